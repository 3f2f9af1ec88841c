"""Compile the kernels while pronk is being installed or packed into a wheel; without a compiler, go on without them."""

from __future__ import annotations

import importlib.util
import os
import sys
import types
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class KernelsHook(BuildHookInterface[Any]):
    """Runs ``src/pronk/kernels/build.py``.

    ``PRONK_LIBRARY`` names a library that has been compiled already, for another platform perhaps, and
    ``PRONK_WHEEL_TAG`` the tag of its wheel; both are for ``make wheels``. An empty ``PRONK_LIBRARY`` is for none.
    """

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Put the library into the package's folder, or into the wheel."""
        if self.target_name != "wheel":
            return
        build = _load(Path(self.root) / "src" / "pronk" / "kernels" / "build.py")
        given = os.environ.get("PRONK_LIBRARY")
        if given == "":
            return
        if given:
            library = Path(given)
            name = library.name
        else:
            name = build.library_name()
            library = Path(self.root) / "src" / "pronk" / "kernels" / name
            sys.stderr.write("Compiling pronk's kernels (half a minute) ...\n")
            try:
                build.build(library)
            except build.BuildError as error:
                library.unlink(missing_ok=True)
                self.app.display_warning(
                    f"pronk is installed without its kernels: {error}. Torch will compute instead, slower and without "
                    "the promise of equal bits. Install a C++ compiler (Debian: apt install g++) and pronk again."
                )
                return
        if version != "editable":
            build_data["force_include"][str(library)] = f"pronk/kernels/{name}"
            build_data["pure_python"] = False
            build_data["tag"] = os.environ.get("PRONK_WHEEL_TAG") or f"py3-none-{_platform()}"


def _platform() -> str:
    """This machine's platform as wheels call it."""
    from packaging.tags import platform_tags  # noqa: PLC0415 - hatchling brings it

    return next(iter(platform_tags()))


def _load(path: Path) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location("pronk_build", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["pronk_build"] = module
    spec.loader.exec_module(module)
    return module
