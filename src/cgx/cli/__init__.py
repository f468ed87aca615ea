"""The command line; it alone prints, and it alone needs the `demo` extra."""

import sys

_EXTRA = ("matplotlib", "rich", "sklearn", "typer")


def main() -> None:
    """Runs the `cgx` command, or says in one sentence what to install first."""
    try:
        from cgx.cli.app import app
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in _EXTRA:
            raise
        sys.exit(f"The cgx command needs {package}, which is missing: pip install 'cgx[demo]'")
    app()
