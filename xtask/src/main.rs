//! Development tasks: `cargo xtask bundle`.

use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};

/// Largest bundle, bytes.
const MAX_BUNDLE: u64 = 60 << 20;

const RUN: &str = r#"#!/bin/sh
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
  for test in ./tests/*; do [ ! -f "$test" ] || try 900 "$test" --test-threads=1; done
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
"#;

fn main() -> ExitCode {
    let task = std::env::args().nth(1);
    let result = match task.as_deref() {
        Some("bundle") => bundle(),
        _ => Err("usage: cargo xtask bundle".into()),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("xtask: {e}");
            ExitCode::FAILURE
        }
    }
}

/// What a program prints; what it says of its progress and of errors is seen at once: a build takes minutes.
fn output(program: &str, args: &[&str]) -> Result<String, String> {
    let out =
        Command::new(program).args(args).stderr(Stdio::inherit()).output().map_err(|e| format!("{program}: {e}"))?;
    if !out.status.success() {
        return Err(format!("{program} {} ended with {}", args.join(" "), out.status));
    }
    Ok(String::from_utf8_lossy(&out.stdout).into_owned())
}

/// Makes `bundle/`: the command, the test programs, sources for compilers that are there, and a `run` script.
fn bundle() -> Result<(), String> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap_or(Path::new(".")).to_owned();
    std::env::set_current_dir(&root).map_err(|e| e.to_string())?;
    let dir = root.join("bundle");
    let _ = std::fs::remove_dir_all(&dir);
    std::fs::create_dir_all(dir.join("tests")).map_err(|e| e.to_string())?;
    // Cargo says in its JSON messages where it puts what.
    let build = ["build", "--release", "--message-format=json", "-p", "forebay-cli"];
    let built = output("cargo", &build)?;
    let command = built.lines().filter_map(|l| field(l, "\"executable\":\"")).find(|p| p.ends_with("/forebay"));
    copy(Path::new(&command.ok_or("cargo built no command")?), &dir.join("forebay"))?;
    let parts = ["-p", "forebay-hal", "-p", "forebay", "-p", "forebay-rm"];
    let test = [&["test", "--release", "--no-run", "--message-format=json"][..], &parts].concat();
    for line in
        output("cargo", &test)?.lines().filter(|l| l.contains("\"test\":true") || l.contains("\"kind\":[\"test\"]"))
    {
        let Some(path) = field(line, "\"executable\":\"") else { continue };
        let name = Path::new(&path).file_name().unwrap_or_default().to_string_lossy().into_owned();
        // Examples' tests read a file of the checkout.
        if !name.starts_with("examples") {
            copy(Path::new(&path), &dir.join("tests").join(name))?;
        }
    }
    // Sources for whatever compiler is there.
    for (from, to) in [("benches/peers", "peers"), ("device", "device"), ("examples/cuda", "examples/cuda")] {
        copy_all(&root.join(from), &dir.join(to))?;
    }
    let commit = output("git", &["rev-parse", "--short=12", "HEAD"]).unwrap_or_else(|_| "unknown".into());
    let run = dir.join("run");
    std::fs::write(&run, RUN.replace("@COMMIT@", commit.trim())).map_err(|e| e.to_string())?;
    executable(&run)?;
    let bytes = size(&dir);
    println!("bundle/: {:.1} MB", bytes as f64 / 1e6);
    if bytes > MAX_BUNDLE {
        return Err(format!("larger than {} MB", MAX_BUNDLE >> 20));
    }
    Ok(())
}

fn field(line: &str, key: &str) -> Option<String> {
    let at = line.find(key)? + key.len();
    Some(line[at..].split('"').next()?.to_owned())
}

/// Copies a file; programs are stripped of debug information.
fn copy(from: &Path, to: &PathBuf) -> Result<(), String> {
    std::fs::copy(from, to).map_err(|e| format!("{}: {e}", from.display()))?;
    let _ = Command::new("strip").arg(to).stderr(Stdio::null()).status();
    Ok(())
}

/// Copies a folder.
fn copy_all(from: &Path, to: &Path) -> Result<(), String> {
    std::fs::create_dir_all(to).map_err(|e| format!("{}: {e}", to.display()))?;
    for entry in std::fs::read_dir(from).map_err(|e| format!("{}: {e}", from.display()))?.flatten() {
        let (file, to) = (entry.path(), to.join(entry.file_name()));
        if file.is_dir() { copy_all(&file, &to)? } else { copy(&file, &to)? }
    }
    Ok(())
}

fn executable(path: &Path) -> Result<(), String> {
    use std::os::unix::fs::PermissionsExt;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o755)).map_err(|e| e.to_string())
}

fn size(dir: &Path) -> u64 {
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
    entries.map(|e| e.metadata().map_or(0, |m| if m.is_dir() { size(&e.path()) } else { m.len() })).sum()
}
