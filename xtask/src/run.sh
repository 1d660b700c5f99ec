#!/bin/sh
# Runs on a host with a GPU and no toolchain: ./run [PART...], all parts without; results go to $OUT (default: ./results),
# with what every command said in $OUT/log and the machine in $OUT/machine.txt. A command that fails or hangs does not hide
# the others: what failed is said at the end. Parts can be run one by one; short ones that say most come first.
cd "$(dirname "$0")" || exit 1
OUT="${OUT:-$PWD/results}"
export FOREBAY_COMMIT="@COMMIT@" FOREBAY_CACHE="${FOREBAY_CACHE:-$OUT/cache}" FOREBAY_MODELS="$OUT/models"
mkdir -p "$OUT/log"
failed="" n=0
# try SECONDS COMMAND...: its output into the log, and here when it has ended; after so long it is told to end, and killed soon
# after. Nothing is read from a pipe: whoever is left behind by a command that hung would hold it open.
try() {
  limit=$1; shift
  n=$((n + 1))
  log="$OUT/log/$(printf %02d $n)-$(basename "$1")-$(echo "${2:-} ${3:-}" | tr -c 'a-z0-9\n' - | sed 's/--*/-/g; s/-$//').txt"
  echo "== $* (at most $limit s)"
  begun=$(date +%s)
  timeout -k 20 "$limit" "$@" > "$log" 2>&1 < /dev/null
  code=$?
  cat "$log"
  echo "== ended with $code after $(($(date +%s) - begun)) s"
  [ "$code" = 0 ] || failed="$failed
  $* ($([ "$code" = 124 ] || [ "$code" = 137 ] && echo "not ended after $limit s" || echo "status $code"); $log)"
}
machine() {
  date; uname -a; cat /proc/driver/nvidia/version /sys/module/nvidia/version
  nvidia-smi; nvidia-smi -q; lscpu; id; ulimit -a; ls -l /dev/nvidia*; readlink /proc/self/ns/pid
}
machine > "$OUT/machine.txt" 2>&1
conformance() {
  try 300 ./forebay doctor --calibrate
  try 900 ./forebay bench conformance --out "$OUT"
  # The grid on this device, a little of everything.
  try 600 ./forebay bench resident --device cuda --quick
  # One at a time: what frees memory of the device waits for the kernels of others, and some of those wait for their test.
  # In TMPDIR, from which programs must be allowed to run.
  unpacked=$(mktemp -d) || { failed="$failed
  no folder for the tests"; return; }
  try 60 tar -xzf tests.tar.gz -C "$unpacked"
  for test in "$unpacked"/*; do [ ! -f "$test" ] || try 900 "$test" --test-threads=1; done
  rm -rf "$unpacked"
}
gesture() {
  try 300 ./forebay demo gesture --device cuda --frames 600 --rate max --quiet
  try 300 ./forebay demo gesture --device cuda --frames 150 --quiet --trace "$OUT/gesture.pftrace"
  try 300 ./forebay demo gesture --device cpu --frames 100 --rate max --quiet
  try 1200 ./forebay bench gesture --device cuda --out "$OUT"
}
dataflow() {
  try 1200 ./forebay bench ptask --device cuda --full --out "$OUT"
  # Whether invocations beside each other are worth their events (docs/transfer.md).
  try 1200 env FOREBAY_LISTS_BESIDE=on ./forebay bench ptask --device cuda --full --out "$OUT/lists-beside"
  try 600 ./forebay bench fusion --device cuda --out "$OUT"
  try 900 ./forebay bench schedulers --out "$OUT"
  try 900 ./forebay bench dispatch --out "$OUT"
}
sharing() {
  # The log of context switches with two programs that share the GPU by the driver's turns; then the service's windows.
  ./forebay demo sharing-program --device cuda --task-us 1000 > /dev/null & one=$!
  ./forebay demo sharing-program --device cuda --task-us 5000 > /dev/null & two=$!
  sleep 5
  try 60 ./forebay trace --seconds 2 "$OUT/switches.pftrace"
  kill $one $two
  try 1800 ./forebay bench sharing --device cuda --out "$OUT"
}
transfer() { try 3000 ./forebay bench transfer --device cuda --out "$OUT"; }
resident() { try 2400 ./forebay bench resident --device cuda --out "$OUT"; }
placement() {
  try 2400 ./forebay bench placement --out "$OUT"
  try 900 ./forebay bench goals --out "$OUT"
}
# NVIDIA's checkers over a little of everything that stays on the device, where they are. They do not all know memory that is
# mapped beside CUDA, so what they say is to be read (the grid goes without such memory where that is refused).
sanitize() {
  checker=$(command -v compute-sanitizer || ls /usr/local/cuda/bin/compute-sanitizer 2>/dev/null)
  [ -n "$checker" ] || { echo "there is no compute-sanitizer here"; return; }
  for part in "round trips" throughput "the heap" "tasks that make tasks"; do
    for tool in memcheck racecheck; do
      try 300 "$checker" --tool "$tool" --error-exitcode 9 ./forebay bench resident --device cuda --quick --part "cuda: $part"
    done
  done
}
for part in ${*:-conformance gesture dataflow sharing transfer resident placement sanitize}; do
  case "$part" in
    conformance | gesture | dataflow | sharing | transfer | resident | placement | sanitize) "$part" ;;
    *) echo "there is no part $part" >&2; exit 2 ;;
  esac
done
[ -z "$failed" ] && exit 0
echo "FAILED:$failed"
exit 1
