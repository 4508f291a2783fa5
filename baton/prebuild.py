"""Build native code ahead, where an image is made: `python -m baton.prebuild MODULE:RECIPE...`."""

from __future__ import annotations

import pkgutil
import sys

from baton.native_build import build_ahead

if __name__ == "__main__":
    for name in sys.argv[1:]:
        build_ahead(pkgutil.resolve_name(name))
