"""A process's log: a line for each event, as text or as a JSON object, in one file.

In a pod that file is the standard output of the container's main process, where `kubectl logs`
looks: Ray gives its processes' own output to files. A cluster file may be followed: its level and
format count as soon as it changes.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from baton.config.cluster import ClusterConfig, LogFormat, LogLevel, parse_config
from baton.config.settings import load_yaml
from baton.reread import Reread

LOG_VARIABLE, SETTINGS_VARIABLE = "BATON_LOG", "BATON_LOG_SETTINGS"
"""In a pod's environment: the file that processes log to, the cluster file that they follow."""
_LOOK_S = 5.0


@dataclass(frozen=True)
class LogSettings:
    level: LogLevel = "info"
    format: LogFormat = "text"

    @classmethod
    def of(cls, config: ClusterConfig) -> LogSettings:
        return cls(config.log_level, config.log_format)


def set_up_logging(
    usual: LogSettings, environment: Mapping[str, str], file: Path | None = None, **named: str
) -> Reread[LogSettings]:
    """Log to the environment's file, else to `file`; to standard error where it cannot be opened.
    `named`: what every line names: worker, rank, pool, model. Returns the settings, which are
    followed until the process ends. Raises ConfigError."""
    written = environment.get(LOG_VARIABLE) or file
    try:
        handler = logging.FileHandler(written) if written else logging.StreamHandler()
    except OSError:
        handler = logging.StreamHandler()
    logging.basicConfig(handlers=[handler], force=True)
    followed = Path(environment.get(SETTINGS_VARIABLE, "/none"))

    def read() -> LogSettings:
        settings = usual
        if followed.is_file():
            said = load_yaml(followed.read_text()) or {}  # the rest may be of another release
            known = {key: said[key] for key in ("log_level", "log_format") if key in said}
            settings = LogSettings.of(parse_config(known, source=str(followed)))
        handler.setFormatter(_Line(settings.format, named))
        logging.getLogger().setLevel(settings.level.upper())
        return settings

    settings = Reread(lambda: [followed], read)
    if SETTINGS_VARIABLE in environment:
        threading.Thread(target=_follow, args=(settings,), name="log-settings", daemon=True).start()
    return settings


def _follow(settings: Reread[LogSettings]) -> None:
    while True:
        time.sleep(_LOOK_S)
        settings.look()


class _Line(logging.Formatter):
    """Formats a record. It may bring fields: `log.info("...", extra={"fields": {"request_id":
    ...}})`."""

    def __init__(self, written_as: LogFormat, named: Mapping[str, str]) -> None:
        super().__init__()
        self._is_json, self._named = written_as == "json", dict(named)
        self._who = ".r".join(named[name] for name in ("worker", "rank") if name in named)

    def format(self, record: logging.LogRecord) -> str:
        at = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        when, message = at.replace("+00:00", "Z"), record.getMessage()
        fields = dict(getattr(record, "fields", {}))
        failure = self.formatException(record.exc_info) if record.exc_info else ""
        if self._is_json:
            level, name = record.levelname.lower(), record.name
            line = {"time": when, "level": level, "logger": name, "message": message}
            raised = {"exception": failure} if failure else {}
            return json.dumps(line | self._named | fields | raised)
        rest = json.dumps(fields) if fields else ""
        said = (when, record.levelname, self._who, f"{record.name}:", message, rest)
        return "\n".join(filter(None, (" ".join(filter(None, said)), failure)))
