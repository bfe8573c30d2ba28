"""The static checks in their order: what is known without a weight read or an engine started."""

from collections.abc import Iterator

from aerie.checkpoint.config import ConfigError
from aerie.checkpoint.layout import Layout, drafter_layout, drafter_name, target_layout
from aerie.rehearsal.findings import Finding, failed, skipped
from aerie.rehearsal.static.arguments import contradictions
from aerie.rehearsal.static.fit import drafter_fits
from aerie.rehearsal.static.memory import Plan, plan, will_fit
from aerie.rehearsal.static.tokenizer import tokenizer_is_right
from aerie.rehearsal.static.whole import weights_are_whole
from aerie.rehearsal.subject import Subject

_WITHOUT = "left out with --without-weights"


def static_checks(subject: Subject) -> Iterator[Finding]:
    """Yield what each check finds."""
    setup = subject.setup
    target, drafter = setup.target, setup.drafter
    try:
        expected = target_layout(target)
    except ConfigError as error:
        yield failed("target config", str(error), "")
        return
    if subject.target_weights is None:
        yield skipped("target files", _WITHOUT)
    else:
        names = {name: name for name in subject.target_weights.tensors}
        yield from weights_are_whole("target", subject.target_weights, expected, names)
    if drafter:
        tensors = subject.drafter_tensors
        if subject.drafter_weights is None:
            yield skipped("drafter files", _WITHOUT)
        else:
            names = {name: drafter_name(name) for name in subject.drafter_weights.tensors}
            layout = drafter_layout(drafter, tensors or None)
            yield from weights_are_whole("drafter", subject.drafter_weights, layout, names)
        yield from drafter_fits(target, drafter, tensors, setup.longest, setup.patches)
    yield from tokenizer_is_right(target, subject.tokenizer, setup.settings, needed=subject.target_weights is not None)
    yield from contradictions(setup)
    yield from will_fit(memory_plan(subject))


def memory_plan(subject: Subject) -> Plan:
    """Return the plan of a GPU's memory with the real pair; raises ConfigError for a quantisation not known here."""
    drafter = subject.setup.drafter
    drafted = drafter_layout(drafter, subject.drafter_tensors or None) if drafter else {}
    return plan(subject.setup, _sizes(target_layout(subject.setup.target)), _sizes(drafted))


def _sizes(layout: Layout) -> dict[str, int]:
    return {name: each.size for name, each in layout.items()}
