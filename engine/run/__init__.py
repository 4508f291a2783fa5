"""An engine that runs: the core over a scheduler and a runner, put together by `build`."""
