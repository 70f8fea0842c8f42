"""How measurements are drawn, as the papers draw them: importing this package makes all drawers known."""

from vitclinic.reports.figures import accuracy as accuracy
from vitclinic.reports.figures import attention as attention
from vitclinic.reports.figures import cka as cka
from vitclinic.reports.figures import corruptions as corruptions
from vitclinic.reports.figures import fourier as fourier
from vitclinic.reports.figures import landscape as landscape
from vitclinic.reports.figures import layers as layers
from vitclinic.reports.figures import network as network
from vitclinic.reports.figures import robustness as robustness
from vitclinic.reports.figures import sharpness as sharpness
from vitclinic.reports.figures import spectra as spectra
from vitclinic.reports.figures import training as training
