//! What `sys.rs` and its neighbours say of the driver's interface, held against NVIDIA's own `cuda.h` and `nvrtc.h` by a
//! C++ compiler: types of functions, layouts, numbers, and which statuses end a context.

use std::any::type_name;
use std::mem::offset_of;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::{checkpoint, nvrtc, part, sys};

/// The folder of a header: beside `nvcc`, beside NVRTC, or where the toolkit is installed.
fn folder_of(header: &str) -> Option<PathBuf> {
    let variable = |name| std::env::var_os(name).map(PathBuf::from);
    let beside = |p: PathBuf| p.parent().map(|p| p.join("include"));
    let nvcc = variable("FOREBAY_NVCC").and_then(|p| p.parent().map(PathBuf::from));
    let places = nvcc.and_then(beside).into_iter().chain(variable("FOREBAY_NVRTC").and_then(beside));
    let found = places.chain(["/usr/local/cuda/include".into()]).find(|d| d.join(header).exists());
    if found.is_none() {
        eprintln!("skipped: no {header} here (FOREBAY_NVCC and FOREBAY_NVRTC say where NVIDIA's packages are)");
    }
    found
}

/// Versions of CUDA whose headers have all that is asked here, and nothing that came later: numbers and layouts change with the
/// names that a later one gives its functions.
const KNOWN: std::ops::RangeInclusive<u32> = 12_080..=13_000;

/// The folder of `cuda.h`, if it is of a version that is known.
fn folder_of_driver() -> Option<PathBuf> {
    let folder = folder_of("cuda.h")?;
    let text = std::fs::read_to_string(folder.join("cuda.h")).unwrap();
    let (_, version) = text.split_once("#define CUDA_VERSION ").unwrap();
    let version: u32 = version.split_whitespace().next().unwrap().parse().unwrap();
    if !KNOWN.contains(&version) {
        eprintln!("skipped: cuda.h of {version}, and {KNOWN:?} are known");
        return None;
    }
    Some(folder)
}

/// A type of Rust as C++ has it. Handles that are plain pointers here match any pointer there.
fn in_cpp(rust: &str) -> String {
    let rust = rust.trim();
    if let Some(to) = rust.strip_prefix("*mut ") {
        return format!("{}*", in_cpp(to));
    }
    if let Some(to) = rust.strip_prefix("*const ") {
        return format!("{} const*", in_cpp(to));
    }
    if rust.starts_with("unsafe extern") || rust.starts_with("[u64; 8") {
        return "Any".into();
    }
    match rust.rsplit("::").next().unwrap_or(rust) {
        "c_int" | "i32" | "CuResult" | "CuDevice" => "int",
        "c_uint" | "u32" => "unsigned",
        "u64" | "usize" => "unsigned long",
        "u8" => "unsigned char",
        "c_char" | "i8" => "char",
        "c_void" => "Any",
        "CuContext" => "CUcontext",
        "CuModule" => "CUmodule",
        "CuFunction" => "CUfunction",
        "CuStream" => "CUstream",
        "CuEvent" => "CUevent",
        "CuGraph" => "CUgraph",
        "CuGraphNode" => "CUgraphNode",
        "CuGraphExec" => "CUgraphExec",
        "CuDevicePtr" => "CUdeviceptr",
        "MemAllocationProp" => "CUmemAllocationProp",
        "MemAccessDesc" => "CUmemAccessDesc",
        "KernelNodeParams" => "CUDA_KERNEL_NODE_PARAMS",
        "Resource" => "CUdevResource",
        "LockArgs" => "CUcheckpointLockArgs",
        other => panic!("what is {other} in C++?"),
    }
    .into()
}

/// The same of a function's type, as the compiler names it; of its arguments and what it returns.
fn function_in_cpp(rust: &str) -> String {
    let (_, rest) = rust.split_once("fn(").unwrap_or_else(|| panic!("{rust} is no function"));
    let (arguments, result) = rest.rsplit_once(") -> ").unwrap_or_else(|| panic!("{rust} returns nothing"));
    let arguments: Vec<_> = arguments.split(", ").map(in_cpp).collect();
    format!("{}({})", in_cpp(result), arguments.join(", "))
}

/// Two types are alike if a call passes them in the same way and pointers lead to the same: enumerations are `int`, numbers
/// are as long and signed alike, and a pointer to `Any` is whatever pointer the other has there.
const ALIKE: &str = "
#include <type_traits>
struct Any;
template<class A, class B, class = void> struct Alike : std::is_same<A, B> {};
template<class A, class B> struct Alike<A, B, std::enable_if_t<std::is_enum_v<B>>>
    : std::bool_constant<std::is_same_v<A, int> && sizeof(B) == 4> {};
template<class A, class B> struct Alike<A, B, std::enable_if_t<std::is_integral_v<A> && std::is_integral_v<B>>>
    : std::bool_constant<sizeof(A) == sizeof(B) && std::is_signed_v<A> == std::is_signed_v<B>> {};
template<class A, class B> struct Alike<A*, B*, std::enable_if_t<!std::is_function_v<B>>>
    : std::bool_constant<Alike<std::remove_const_t<A>, std::remove_const_t<B>>::value
        && (std::is_const_v<A> == std::is_const_v<B> || std::is_same_v<std::remove_const_t<A>, Any>)> {};
template<class B> struct Alike<Any, B*> : std::true_type {};
template<class B> struct Alike<Any, B, std::enable_if_t<!std::is_pointer_v<B>>> : std::true_type {};
template<class R, class... A, class S, class... B> struct Alike<R(A...), S(B...)> {
    static constexpr bool value = [] {
        if constexpr (sizeof...(A) == sizeof...(B)) return Alike<R, S>::value && (Alike<A, B>::value && ...);
        return false;
    }();
};
#define SAME(symbol, ...) static_assert(Alike<__VA_ARGS__, decltype(symbol)>::value, #symbol)
#define IS(what, number) static_assert((long)(what) == number, #what)
";

/// The compiler's word on assertions that come after `header`.
fn check(folder: &Path, header: &str, assertions: &str) -> Option<Result<(), String>> {
    let source = std::env::temp_dir().join(format!("forebay-abi-{}-{header}.cpp", std::process::id()));
    let text = format!("#include <cstddef>\n#include <{header}>\n{ALIKE}{assertions}");
    std::fs::write(&source, text).unwrap();
    let out = Command::new("g++").args(["-std=c++17", "-fsyntax-only", "-I"]).arg(folder).arg(&source).output();
    std::fs::remove_file(&source).unwrap();
    match out {
        Ok(out) if out.status.success() => Some(Ok(())),
        Ok(out) => Some(Err(String::from_utf8_lossy(&out.stderr).into_owned())),
        Err(e) => {
            eprintln!("skipped: no g++: {e}");
            None
        }
    }
}

/// What the driver's functions that not every driver has are taken for.
fn optional() -> Vec<(&'static str, &'static str)> {
    let tables = [sys::Loading::types(), part::Calls::types(), checkpoint::Calls::types()];
    let own = ("cuGetProcAddress_v2", type_name::<sys::GetProc>());
    tables.into_iter().flatten().chain([own]).collect()
}

fn functions() -> String {
    let mut out = String::new();
    for (symbol, arguments) in sys::SIGNATURES {
        let arguments: Vec<_> = arguments.iter().map(|a| in_cpp(a)).collect();
        out += &format!("SAME({symbol}, int({}));\n", arguments.join(", "));
    }
    for (symbol, rust) in optional() {
        out += &format!("SAME({symbol}, {});\n", function_in_cpp(rust));
    }
    out
}

fn layouts() -> String {
    let mut out = String::new();
    macro_rules! layout {
        ($ours:ty = $theirs:literal: $($field:ident = $member:literal),*) => {
            out += &format!("IS(sizeof({}), {});\n", $theirs, size_of::<$ours>());
            $(out += &format!("IS(offsetof({}, {}), {});\n", $theirs, $member, offset_of!($ours, $field));)*
        };
    }
    layout!(sys::MemAllocationProp = "CUmemAllocationProp": kind = "type", handle_types = "requestedHandleTypes",
        location = "location", win32 = "win32HandleMetaData", compression = "allocFlags.compressionType",
        rdma_capable = "allocFlags.gpuDirectRDMACapable", usage = "allocFlags.usage");
    layout!(sys::MemLocation = "CUmemLocation": kind = "type", id = "id");
    layout!(sys::MemAccessDesc = "CUmemAccessDesc": location = "location", flags = "flags");
    layout!(sys::KernelNodeParams = "CUDA_KERNEL_NODE_PARAMS": func = "func", grid = "gridDimX", block = "blockDimX",
        shared_bytes = "sharedMemBytes", params = "kernelParams", extra = "extra", kernel = "kern", context = "ctx");
    layout!(part::Resource = "CUdevResource": kind = "type", multiprocessors = "sm.smCount",
        least = "sm.minSmPartitionSize", alignment = "sm.smCoscheduledAlignment");
    layout!(checkpoint::LockArgs = "CUcheckpointLockArgs": timeout_ms = "timeoutMs", reserved0 = "reserved0");
    for all_reserved in ["Checkpoint", "Restore", "Unlock"] {
        out += &format!("IS(sizeof(CUcheckpoint{all_reserved}Args), {});\n", size_of::<checkpoint::NoArgs>());
    }
    out
}

fn numbers() -> String {
    let all = [
        ("CUDA_SUCCESS", sys::SUCCESS),
        ("CUDA_ERROR_OUT_OF_MEMORY", sys::ERROR_OUT_OF_MEMORY),
        ("CUDA_ERROR_NOT_READY", sys::ERROR_NOT_READY),
        ("CUDA_ERROR_NOT_FOUND", sys::ERROR_NOT_FOUND),
        ("CU_DEVICE_ATTRIBUTE_CLOCK_RATE", sys::ATTRIBUTE_CLOCK_RATE),
        ("CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT", sys::ATTRIBUTE_MULTIPROCESSOR_COUNT),
        ("CU_DEVICE_ATTRIBUTE_COMPUTE_MODE", sys::ATTRIBUTE_COMPUTE_MODE),
        ("CU_COMPUTEMODE_PROHIBITED", sys::COMPUTE_PROHIBITED as i32),
        ("CU_COMPUTEMODE_EXCLUSIVE_PROCESS", sys::COMPUTE_EXCLUSIVE as i32),
        ("CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR", sys::ATTRIBUTE_CC_MAJOR),
        ("CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR", sys::ATTRIBUTE_CC_MINOR),
        ("CU_DEVICE_ATTRIBUTE_PCI_BUS_ID", sys::ATTRIBUTE_PCI_BUS),
        ("CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID", sys::ATTRIBUTE_PCI_DEVICE),
        ("CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID", sys::ATTRIBUTE_PCI_DOMAIN),
        ("CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED", sys::ATTRIBUTE_RDMA_WITH_VMM),
        ("CU_MEM_ALLOCATION_TYPE_PINNED", sys::MEM_ALLOCATION_PINNED),
        ("CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR", sys::MEM_HANDLE_POSIX_FD),
        ("CU_LIMIT_MALLOC_HEAP_SIZE", sys::LIMIT_MALLOC_HEAP),
        ("CU_MEM_LOCATION_TYPE_DEVICE", sys::MEM_LOCATION_DEVICE),
        ("CU_MEM_ACCESS_FLAGS_PROT_READWRITE", sys::MEM_ACCESS_READ_WRITE),
        ("CU_MEM_ALLOC_GRANULARITY_MINIMUM", sys::MEM_GRANULARITY_MINIMUM),
        ("CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD", sys::MEM_RANGE_DMA_BUF),
        ("CU_STREAM_NON_BLOCKING", sys::STREAM_NON_BLOCKING.cast_signed()),
        ("CU_EVENT_BLOCKING_SYNC", sys::EVENT_BLOCKING_SYNC.cast_signed()),
        ("CU_EVENT_DISABLE_TIMING", sys::EVENT_DISABLE_TIMING.cast_signed()),
        ("CU_MEMHOSTALLOC_PORTABLE", sys::MEMHOSTALLOC_PORTABLE.cast_signed()),
        ("CU_DEV_RESOURCE_TYPE_SM", part::RESOURCE_SM),
        ("CU_GREEN_CTX_DEFAULT_STREAM", part::GREEN_CTX_DEFAULT_STREAM.cast_signed()),
        ("CU_PROCESS_STATE_RUNNING", 0),
        ("CU_PROCESS_STATE_LOCKED", 1),
        ("CU_PROCESS_STATE_CHECKPOINTED", 2),
        ("CU_PROCESS_STATE_FAILED", 3),
    ];
    all.iter().map(|(name, value)| format!("IS({name}, {value});\n")).collect()
}

#[test]
fn the_driver_s_interface_is_what_its_header_says() {
    let all = functions() + &layouts() + &numbers();
    let Some(folder) = folder_of_driver() else { return };
    let Some(found) = check(&folder, "cuda.h", &all) else { return };
    found.unwrap_or_else(|e| panic!("{e}"));
    // What differs is seen.
    for wrong in [
        "SAME(cuMemAlloc_v2, int(CUdeviceptr*, unsigned));",
        "SAME(cuMemAlloc_v2, int(CUdeviceptr, unsigned long));",
        "SAME(cuMemAlloc_v2, int(CUdeviceptr*));",
        "SAME(cuStreamDestroy_v2, int(CUevent));",
        "SAME(cuMemCreate, int(unsigned long*, unsigned long, CUmemAllocationProp*, unsigned long));",
        "SAME(cuStreamCreate, int(CUstream, unsigned));",
        "IS(sizeof(CUmemLocation), 12);",
    ] {
        assert!(check(&folder, "cuda.h", wrong).is_some_and(|r| r.is_err()), "{wrong}");
    }
}

#[test]
fn the_compiler_s_interface_is_what_its_header_says() {
    let assertions: String =
        nvrtc::types().iter().map(|(symbol, rust)| format!("SAME({symbol}, {});\n", function_in_cpp(rust))).collect();
    let Some(folder) = folder_of("nvrtc.h") else { return };
    let Some(found) = check(&folder, "nvrtc.h", &assertions) else { return };
    found.unwrap_or_else(|e| panic!("{e}"));
}

/// The header says of each status what it means; those that end a process's work on the GPU say that one of two things
/// remains.
#[test]
fn statuses_that_end_a_context_are_those_of_which_the_header_says_so() {
    let Some(folder) = folder_of_driver() else { return };
    let text = std::fs::read_to_string(folder.join("cuda.h")).unwrap();
    let (_, text) = text.split_once("typedef enum cudaError_enum").unwrap();
    let (text, _) = text.split_once("} CUresult").unwrap();
    let mut seen = 0;
    for entry in text.split("/**").skip(1) {
        let Some((meaning, value)) = entry.split_once("*/") else { continue };
        let Some(code) = value.split_once('=').and_then(|(_, v)| {
            v.trim().chars().take_while(char::is_ascii_digit).collect::<String>().parse::<i32>().ok()
        }) else {
            continue;
        };
        seen += 1;
        let meaning = meaning.split(['*', '\n', ' ']).filter(|w| !w.is_empty()).collect::<Vec<_>>().join(" ");
        let ends = ["the process must be terminated", "The context cannot be used anymore"];
        if ends.iter().any(|e| meaning.contains(e)) {
            assert!(sys::STICKY.contains(&code), "{code} ends a context: {meaning}");
        } else if !sys::ENDS_BY_EXPERIENCE.contains(&code) {
            assert!(!sys::STICKY.contains(&code), "{code} does not end a context: {meaning}");
        }
    }
    assert!(seen > 80, "{seen} statuses");
}
