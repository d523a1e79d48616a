"""What the process says when the memory of a mapped file is gone."""

cdef extern from *:
    """
    #include <cerrno>
    #include <csignal>
    #include <cstring>
    #include <unistd.h>

    static char ikpy_message[512];
    static size_t ikpy_message_size = 0;

    // Runs in the thread that read the memory, so only async-signal-safe calls are possible. The instruction would be
    // tried again for ever on return: the process ends here.
    static void ikpy_on_bus_error(int number, siginfo_t* info, void*) {
        if (info->si_code == BUS_ADRERR) {
            if (write(2, ikpy_message, ikpy_message_size) < 0) {}
            _exit(1);
        }
        signal(number, SIG_DFL);
        raise(number);
    }

    static int ikpy_name_bus_errors(const char* message, size_t size) {
        struct sigaction action;
        if (sigaction(SIGBUS, nullptr, &action) != 0)
            return errno;
        const bool is_ours = (action.sa_flags & SA_SIGINFO) && action.sa_sigaction == ikpy_on_bus_error;
        if (!is_ours && ((action.sa_flags & SA_SIGINFO) || action.sa_handler != SIG_DFL))
            return 0;
        ikpy_message_size = size < sizeof ikpy_message ? size : sizeof ikpy_message;
        memcpy(ikpy_message, message, ikpy_message_size);
        memset(&action, 0, sizeof action);
        action.sa_sigaction = ikpy_on_bus_error;
        action.sa_flags = SA_SIGINFO;
        return sigaction(SIGBUS, &action, nullptr) == 0 ? 0 : errno;
    }
    """
    int ikpy_name_bus_errors(const char* message, size_t size)


def name_bus_errors(bytes message) -> None:
    """Let the process end with this text (up to 512 bytes, with its line end) on standard error and status 1 when
    mapped memory has no file behind it any more (SIGBUS with BUS_ADRERR), for the rest of the process.

    Handlers that others installed (faulthandler, sanitizers) stay. Raises OSError.
    """
    error = ikpy_name_bus_errors(message, len(message))
    if error:
        raise OSError(error, "sigaction")
