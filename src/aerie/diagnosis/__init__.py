"""Why an engine died: the root cause picked out of its log, matched with known signatures. Pure, no I/O."""

from aerie.diagnosis.collector import Collector
from aerie.diagnosis.diagnosis import Diagnosis
from aerie.diagnosis.evidence import Evidence, parse_kernel, pci_address, relevant
from aerie.diagnosis.root_cause import RootCause
from aerie.diagnosis.signatures import Kind, Severity

__all__ = [
    "Collector",
    "Diagnosis",
    "Evidence",
    "Kind",
    "RootCause",
    "Severity",
    "parse_kernel",
    "pci_address",
    "relevant",
]
