//! Compiles the policy against the StarPU of this machine; without one the library is empty.

fn main() {
    println!("cargo:rerun-if-changed=src/policy.c");
    println!("cargo:rustc-check-cfg=cfg(starpu)");
    // A StarPU that is installed later is found by the next build.
    let places = pkg_config::get_variable("pkg-config", "pc_path").unwrap_or_default();
    for dir in std::env::split_paths(&places).filter(|d| d.is_dir()) {
        println!("cargo:rerun-if-changed={}", dir.display());
    }
    let probe = |name| pkg_config::Config::new().cargo_metadata(false).probe(name);
    let Ok(found) = probe("starpu-1.4").or_else(|_| probe("starpu-1.3")) else { return };
    cc::Build::new().file("src/policy.c").includes(found.include_paths).warnings_into_errors(true).compile("policy");
    println!("cargo:rustc-cfg=starpu");
    // Preloaded, it meets shells and other programs that have no StarPU, too: its names are looked up when they are used.
    println!("cargo:rustc-link-arg-cdylib=-Wl,-z,lazy");
}
