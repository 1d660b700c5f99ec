//! Writes one message of each kind into a folder, a file each: from where fuzzing begins.

use forebay_proto::wire::{Class, Level, Process, Refusal, Reply, Request, Source, VERSION, encode};

fn main() {
    let dir = std::path::PathBuf::from(std::env::args_os().nth(1).expect("a folder"));
    std::fs::create_dir_all(&dir).expect("a folder that can be made");
    let requests = [
        Request::Hello { version: VERSION, name: "program".into() },
        Request::Join { device: "cpu".into() },
        Request::Leave { account: 0 },
        Request::Set { pid: 7, class: Some(Class::Custom(250_000)), nice: Some(-3) },
        Request::Limit { pid: 7, memory: Some(1 << 30) },
        Request::Resume { pid: 7 },
        Request::List { after: 0 },
        Request::Devices,
        Request::Bring { device: "gpu".into() },
        Request::CoRun { group: "mine".into(), class: Some(Class::Interactive), nice: None },
    ];
    let process = Process {
        pid: 7,
        uid: 1000,
        name: "program".into(),
        device: "gpu0".into(),
        class: Class::Background,
        nice: 19,
        active: true,
        waiting: false,
        share: 500_000,
        used: 499_000,
        spent_ns: 1 << 40,
        source: Source::Switches,
        switches: Some(300),
        off_ns: Some(1 << 39),
        level: Level::Hardware,
        memory_limit: None,
    };
    let replies = [
        Reply::Done,
        Reply::Joined { account: 0, metered: true },
        Reply::Processes { processes: vec![process; 3], more: true },
        Reply::Refused(Refusal::Overbooked { device: "gpu0".into(), wanted: 600_000, free: 400_000 }),
    ];
    let all = requests.iter().map(encode).chain(replies.iter().map(encode));
    for (i, bytes) in all.enumerate() {
        std::fs::write(dir.join(format!("message-{i:02}")), bytes).expect("a file that can be written");
    }
}
