"""Numbers for people: bytes, milliseconds, counts."""

_UNITS = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))


def gib(num_bytes: float) -> str:
    """Bytes in the largest binary unit that leaves at least 0.1.

    Example:
        >>> gib(3 * 2**29), gib(5000)
        ('1.5 GiB', '4.9 KiB')
    """
    for size, unit in _UNITS:
        if num_bytes >= size / 10:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes:.0f} bytes"


def ms(seconds: float) -> str:
    """Seconds as milliseconds, without the unit.

    Example:
        >>> ms(0.25), ms(0.0012345)
        ('250.0', '1.234')
    """
    milliseconds = seconds * 1e3
    return f"{milliseconds:.1f}" if milliseconds >= 100 else f"{milliseconds:.3f}"


def count(number: int, noun: str) -> str:
    """A number and its noun, in the plural where that is due.

    Example:
        >>> count(1, "device"), count(2, "batch")
        ('1 device', '2 batches')
    """
    plural = "es" if noun.endswith("ch") else "s"
    return f"{number} {noun}{'' if number == 1 else plural}"


def schedule_words(text: str) -> str:
    """A schedule in a few words: its name, or what there is in one that is written out."""
    actions = text.split()
    if len(actions) < 2:
        return text
    split = sum("W" in action for action in actions)
    backwards = split + sum("B" in action for action in actions)
    kind = f"{split} of {count(backwards, 'backward')} split" if split else "written out"
    return f"{count(len(actions), 'action')} ({kind})"
