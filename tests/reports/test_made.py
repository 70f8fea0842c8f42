"""The made-up exam has every probe there is, so that tests of the page see all of them."""

from tests.reports.made import vit
from vitclinic.probes import known_probes


def test_every_probe_is_there():
    ours = {name for name, probe in known_probes().items() if probe.__module__.startswith("vitclinic.")}
    assert set(vit().measurements) == ours
