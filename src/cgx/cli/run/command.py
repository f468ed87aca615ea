"""`cgx run`: starts a script under torchrun with the variable ``CGX`` set."""

from __future__ import annotations

from typing import Annotated

import typer

from cgx.core.env import is_autoload_off, set_how
from cgx.core.plan import OFF, to_specs
from cgx.errors import SpecError

# What follows the options of cgx is torchrun's, up to the script; what follows that is the script's.
SETTINGS = {"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": False}


def run(
    context: typer.Context,
    how: Annotated[
        str, typer.Option(help="auto, off, or a spec such as uniform:4; comes ahead of torchrun's options.")
    ] = "auto",
) -> None:
    """Starts a script under torchrun and compresses the gradients of every DDP model it makes.

    cgx run [--how HOW] [TORCHRUN OPTIONS] SCRIPT [ARGUMENTS]
    """
    if not context.args:
        raise typer.BadParameter("say which script to run: cgx run --nproc-per-node 2 train.py")
    try:
        if how not in ("auto", OFF):
            to_specs(how)
    except SpecError as error:
        raise typer.BadParameter(str(error), param_hint="--how") from error
    if is_autoload_off():
        raise typer.BadParameter(
            "TORCH_DEVICE_BACKEND_AUTOLOAD=0 keeps torch from loading cgx, so nothing would be compressed; unset it"
        )
    from torch.distributed.run import main

    set_how(how)
    main(context.args)
