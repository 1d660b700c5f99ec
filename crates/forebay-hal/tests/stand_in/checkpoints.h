// Checkpoints of other processes. Their states are files, since whoever asks next is another process: 0 running, 1 locked, 2 saved.
#pragma once

static std::string state_file(int pid) {
  const char* folder = getenv("FOREBAY_STAND_IN_STATES");
  return std::string(folder ? folder : "/nowhere") + "/" + std::to_string(pid);
}
API int cuCheckpointProcessGetState(int pid, int* state) {
  std::ifstream f(state_file(pid));
  return f >> *state ? OK : INVALID_VALUE;
}
static int step(int pid, int from, int to) {
  int state;
  if (!initialised) return NOT_INITIALIZED;
  if (cuCheckpointProcessGetState(pid, &state)) return INVALID_VALUE;
  if (state != from) return 401;  // illegal state
  std::ofstream(state_file(pid)) << to;
  return OK;
}
// Where it is wanted, who is locked is stopped.
static int stop(int pid, int status, int signal) {
  if (!status && getenv("FOREBAY_STAND_IN_STOPS")) kill(pid, signal);
  return status;
}
// Where it is wanted, a process with something that does not end is not locked, which takes as long as it was given; how
// long that was is noted.
API int cuCheckpointProcessLock(int pid, void* args) {
  if (std::ifstream(state_file(pid) + ".long")) {
    unsigned ms = args ? *(unsigned*)args : 0;
    std::ofstream(state_file(pid) + ".long", std::ios::app) << ms << "\n";
    // 0 is no limit.
    usleep((ms ? ms : 600000) * 1000);
    return NOT_READY;
  }
  return stop(pid, step(pid, 0, 1), SIGSTOP);
}
API int cuCheckpointProcessCheckpoint(int pid, void*) {
  // A process with memory that cannot be moved.
  if (std::ifstream(state_file(pid) + ".shared")) return NOT_SUPPORTED;
  return step(pid, 1, 2);
}
API int cuCheckpointProcessRestore(int pid, void*) {
  if (std::ifstream(state_file(pid) + ".full")) return OUT_OF_MEMORY;
  // Somebody else may unlock it at once.
  return step(pid, 2, std::ifstream(state_file(pid) + ".unlocked") ? 0 : 1);
}
API int cuCheckpointProcessUnlock(int pid, void*) {
  // Where it is wanted, not now.
  if (std::ifstream(state_file(pid) + ".stuck")) return NOT_READY;
  return stop(pid, step(pid, 1, 0), SIGCONT);
}
