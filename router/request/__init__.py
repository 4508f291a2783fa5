"""One request: its check, its attempts on workers, its retries and its output."""
