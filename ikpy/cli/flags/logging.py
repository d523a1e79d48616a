"""Options of log output."""

from ikpy.cli.options import FLAG, INT, NONEMPTY_PATH, OFF, PATH, SWITCH_OR_AUTO, Kind, ignored, option

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
    option("--log-disable", FLAG, "log.disable", "no log lines; warnings and errors remain"),
    option("--log-enable", OFF, "log.disable", "log lines, after an earlier --log-disable"),
    option("--log-file", NONEMPTY_PATH, "log.file", "file that gets a copy of the log", env="LLAMA_LOG_FILE"),
    option("--log-append", FLAG, "log.append", "the log file keeps what it has"),
    option("--log-new", FLAG, "log.new", "a log file for each run: FILE.1.ENDING, FILE.2.ENDING, ..."),
    option(
        "--log-prefix",
        FLAG,
        "log.prefix",
        "log lines begin with their level: I, W (warning) or E (error)",
        env="LLAMA_LOG_PREFIX",
    ),
    option("--no-log-prefix", OFF, "log.prefix", "log lines without their level"),
    option(
        "--log-timestamps",
        FLAG,
        "log.timestamps",
        "log lines begin with minutes.seconds.milliseconds.microseconds since the start",
        env="LLAMA_LOG_TIMESTAMPS",
    ),
    option("--no-log-timestamps", OFF, "log.timestamps", "log lines without times"),
    option(
        "--log-colors",
        SWITCH_OR_AUTO,
        "log.colors",
        "errors and warnings in colour on standard error; auto: on terminals, unless NO_COLOR is set",
        env="LLAMA_LOG_COLORS",
    ),
    option("--perf --show-timings", FLAG, "log.timings", "times at the end, of the server behind each answer"),
    option("--no-perf --no-show-timings", OFF, "log.timings", "no times"),
    option("-ld --logdir", PATH, "log.directory", "directory of the YAML result log", "P"),
    ignored("--log-test", "there is no test of the log", "trace log test"),
)
