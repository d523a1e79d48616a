"""Options of the threads of computations: for single tokens, for prompts, and the same of drafters."""

from ikpy.cli.options import ALL, Kind, Option, option
from ikpy.cli.thread_options import to_mask, to_range
from ikpy.cli.values import bounded, to_switch

MASK = Kind("HEX", to_mask)
RANGE = Kind("LO-HI", to_range)
STRICT = Kind("0|1", to_switch)
PRIORITY = Kind("N", bounded(-1, 3))
POLL = Kind("N", bounded(0, 100))


def rows(dest: str, short: str, ending: str, drafts: str, what: str, used: str) -> tuple[Option, ...]:
    """The options of one set of threads; drafts: ending of the spellings with `spec-draft`, or `-` for none."""

    def names(option: str, short: str = "") -> str:
        return " ".join(filter(None, [short, f"--{option}{ending}", *spelled(option)]))

    def spelled(option: str) -> list[str]:
        return [] if drafts == "-" else [f"--spec-draft-{option}{drafts}"]

    return (
        option(names("cpu-mask", f"-C{short}"), MASK, f"{dest}.mask", f"CPUs {what} run on, bit by bit", used),
        option(names("cpu-range", f"-Cr{short}"), RANGE, f"{dest}.range", f"CPUs {what} run on, beside the mask", used),
        option(names("cpu-strict"), STRICT, f"{dest}.strict", f"1: {what} have a CPU each, else all of them", used),
        option(
            names("prio"),
            PRIORITY,
            f"{dest}.priority",
            f"priority of {what}: -1 in the background, 0 usual, 1 to 3 real-time, if the system permits it",
            used,
        ),
        option(
            names("poll"),
            POLL,
            f"{dest}.poll",
            f"how long {what} wait actively between operations, from 0 (not at all) over 50 (usual) to 100",
            used,
        ),
    )


ROWS = (
    *rows("threads", "", "", "-", "threads", ALL),
    *rows("threads_batch", "b", "-batch", "-", "threads for prompts", ALL),
    *rows("threads_draft", "d", "-draft", "", "threads of the draft model", "SC"),
    *rows("threads_batch_draft", "bd", "-batch-draft", "-batch", "threads of the draft model for prompts", "SC"),
)
