"""Options of log output."""

from ikpy.cli.options import FLAG, INT, PATH, SWITCH, Kind, always, ignored, option

NO_TRACE = "no log file is written; redirect standard error instead"

PLAIN = "log lines have one form"

ROWS = (
    option("--config", PATH, "config", "TOML file with options; everything else overrides it", env="IKPY_CONFIG"),
    option(
        "-v --verbose --log-verbose",
        Kind(const=1),
        "log.verbosity",
        "a traceback with errors; in imatrix also -lv 1",
    ),
    option("-lv --verbosity --log-verbosity", INT, "log.verbosity", "level of detail: 0, 1 or 2", "I"),
    option("--minilog", FLAG, "log.minilog", "fewer lines while loading"),
    option("--log-disable", FLAG, "log.disable", "no log lines on standard error"),
    option("-ld --logdir", PATH, "log.directory", "directory of the YAML result log", "P"),
    ignored("--log-enable", NO_TRACE, "trace log"),
    ignored("--log-test", NO_TRACE, "trace log test"),
    ignored("--log-new", NO_TRACE, "new trace log for each run"),
    ignored("--log-append", NO_TRACE, "append to the trace log"),
    ignored("--log-file", NO_TRACE, "name of the trace log", kind=PATH),
    ignored("--log-prefix --log-timestamps", PLAIN, "prefix and time of log lines"),
    always("--no-log-prefix --no-log-timestamps", "log lines without prefix and time"),
    ignored("--log-colors", "log lines are not coloured", "coloured log lines", kind=SWITCH, quiet="off auto 0 false"),
)
