"""A real Kubernetes API server for tests: found, or built once, and run beside them.

`assets` finds the programs or says what is missing; `build` (with `recipe`, `debian`, `steps`)
makes them; `servers` (with `process`) runs them; `plane` is what tests use.

Nothing here knows of Baton. No test builds anything: `make control-plane` does.
"""
