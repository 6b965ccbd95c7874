/* Ranges for callgrind: counting is off until a range begins, and each range ends in a dump of its own. */
#include <valgrind/callgrind.h>

void range_begin(void) {
    CALLGRIND_START_INSTRUMENTATION;
}

void range_end(const char *name) {
    CALLGRIND_DUMP_STATS_AT(name);
    CALLGRIND_STOP_INSTRUMENTATION;
}
