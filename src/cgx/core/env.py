"""The environment variables cgx reads; no other module looks at the environment."""

from __future__ import annotations

import os

from cgx.errors import SpecError

CODEC_THREADS = "CGX_THREADS"
HOW = "CGX"


def how() -> str | None:
    """How gradients of models that a script makes travel, by the variable ``CGX``; None where it is unset or empty."""
    return os.environ.get(HOW, "").strip() or None


def set_how(how: str) -> None:
    """Sets ``CGX`` for the processes that this one starts."""
    os.environ[HOW] = how


def is_autoload_off() -> bool:
    """Whether torch was told not to load what others install beside it, cgx among them."""
    return os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") == "0"


def codec_threads() -> int:
    """Threads a codec call may use: ``CGX_THREADS``, else this process's share of the cores, at most four.

    More than four threads saturate the memory of ordinary machines and starve the model's own threads.
    """
    asked = os.environ.get(CODEC_THREADS)
    if asked is not None:
        if not asked.isdecimal() or int(asked) < 1:
            raise SpecError(f"{CODEC_THREADS} must be a positive whole number, found {asked!r}")
        return int(asked)
    return max(1, min(4, len(os.sched_getaffinity(0)) // (local_world_size() or 1)))


def local_world_size() -> int | None:
    """Ranks that the launcher started on this machine, if it says so (torchrun does)."""
    local = os.environ.get("LOCAL_WORLD_SIZE", "")
    return int(local) if local.isdecimal() and int(local) > 0 else None


def restart_count() -> int:
    """How often the launcher has started this job's ranks again (torchrun says so)."""
    count = os.environ.get("TORCHELASTIC_RESTART_COUNT", "")
    return int(count) if count.isdecimal() else 0


def gloo_interface() -> str | None:
    """Network interface the user chose for Gloo, if any."""
    return os.environ.get("GLOO_SOCKET_IFNAME")


def original_setting(name: str, default: int) -> int:
    """A variable of the original CGX, ``CGX_COMPRESSION_<name>``, that scripts and job files still set.

    Raises:
        SpecError: It is set to something other than a whole number of at least zero.
    """
    variable = f"CGX_COMPRESSION_{name}"
    asked = os.environ.get(variable, "").strip()
    if asked and not asked.isdecimal():
        raise SpecError(
            f"{variable} must be a whole number, found {asked!r}; unset it for the default of {default}, "
            "or see docs/migration.md"
        )
    return int(asked) if asked else default
