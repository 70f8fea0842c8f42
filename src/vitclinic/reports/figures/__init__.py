"""One file a probe: how its measurements are drawn, as the papers draw them."""

from vitclinic.reports.figures import attention_distance as attention_distance
from vitclinic.reports.figures import attention_entropy as attention_entropy
from vitclinic.reports.figures import attention_maps as attention_maps
from vitclinic.reports.figures import cb_scale as cb_scale
from vitclinic.reports.figures import cka as cka
from vitclinic.reports.figures import fourier as fourier
from vitclinic.reports.figures import lesion as lesion
from vitclinic.reports.figures import sparsity as sparsity
from vitclinic.reports.figures import token_similarity as token_similarity
from vitclinic.reports.figures import variance as variance
