//! The conformance suite on every device of this machine.

mod stand_in;

use forebay_hal::{Device, Kind, conformance, discover};

fn check(device: &dyn Device) {
    let failed: Vec<_> = conformance::run(device).into_iter().filter(|o| o.failure.is_some()).collect();
    assert!(failed.is_empty(), "{}: {failed:#?}", device.info().name);
}

fn check_kind(kind: Kind) {
    let (devices, missing) = discover(&[kind]);
    for (kind, why) in missing {
        eprintln!("skipped: no {kind} device here: {why}");
    }
    devices.iter().for_each(|d| check(&**d));
}

#[test]
fn cpu() {
    check_kind(Kind::Cpu);
}

#[test]
fn sim() {
    check_kind(Kind::Sim);
}

#[test]
fn opencl() {
    check_kind(Kind::OpenCl);
}

#[test]
fn cuda() {
    check_kind(Kind::Cuda);
}

/// The CUDA backend against a stand-in for the driver that runs kernels on the host: what can be tested without a GPU.
#[test]
fn cuda_with_the_stand_in() {
    stand_in::again("cuda");
}
