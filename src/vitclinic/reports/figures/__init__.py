"""One file a probe: how its measurements are drawn, as the papers draw them."""

from vitclinic.reports.figures import accuracy as accuracy
from vitclinic.reports.figures import attacks as attacks
from vitclinic.reports.figures import corruptions as corruptions
from vitclinic.reports.figures import cost as cost
from vitclinic.reports.figures import flatness as flatness
from vitclinic.reports.figures import frequency_noise as frequency_noise
from vitclinic.reports.figures import hessian_spectrum as hessian_spectrum
from vitclinic.reports.figures import landscape as landscape
from vitclinic.reports.figures import missing_rate as missing_rate
from vitclinic.reports.figures import norms as norms
from vitclinic.reports.figures import ntk as ntk
from vitclinic.reports.figures import occlusion as occlusion
from vitclinic.reports.figures import shape_bias as shape_bias
from vitclinic.reports.figures import sharpness as sharpness
from vitclinic.reports.figures import shift as shift
from vitclinic.reports.figures import train_nll as train_nll
from vitclinic.reports.figures import training as training
from vitclinic.reports.figures import trajectory as trajectory
