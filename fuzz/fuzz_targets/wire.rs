//! Any bytes are a message or none, and what is a message is the same again after a round; any bytes are a page that can
//! be read.
#![no_main]

use forebay_proto::memory::Made;
use forebay_proto::page::{ClientPage, GlobalPage, PAGE};
use forebay_proto::wire::{MAX_REPLY, MAX_REQUEST, Reply, Request, decode, encode};
use libfuzzer_sys::fuzz_target;

fn page<P: forebay_proto::page::Page>(bytes: &[u8], read: impl Fn(&P)) {
    let made = Made::<P>::new("fuzz", true).expect("a page");
    let mut whole = [0; PAGE];
    let n = bytes.len().min(PAGE);
    whole[..n].copy_from_slice(&bytes[..n]);
    std::os::unix::fs::FileExt::write_all_at(
        &std::fs::File::from(made.file().try_clone_to_owned().expect("a copy")),
        &whole,
        0,
    )
    .expect("written");
    read(&made);
}

fuzz_target!(|bytes: &[u8]| {
    if let Ok(m) = decode::<Request>(bytes, MAX_REQUEST) {
        assert_eq!(decode::<Request>(&encode(&m), MAX_REQUEST), Ok(m));
    }
    if let Ok(m) = decode::<Reply>(bytes, MAX_REPLY) {
        assert_eq!(decode::<Reply>(&encode(&m), MAX_REPLY), Ok(m));
    }
    page::<GlobalPage>(bytes, |p| (0..10).for_each(|d| _ = std::hint::black_box(p.device(d))));
    page::<ClientPage>(bytes, |p| p.accounts.iter().for_each(|a| _ = std::hint::black_box(a.standing())));
});
