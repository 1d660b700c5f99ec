//! The messages. One packet is one message, in postcard's encoding; what is too long, cut off or followed by anything is no
//! message.

use serde::{Deserialize, Serialize, de::DeserializeOwned};

/// Version of the protocol. Another one is refused: program and service come from one build.
pub const VERSION: u16 = 7;
/// Longest request, bytes.
pub const MAX_REQUEST: usize = 512;
/// Longest reply, bytes.
pub const MAX_REPLY: usize = 32 << 10;
/// Longest name of a program or a device, bytes; longer ones are cut.
pub const MAX_NAME: usize = 64;
/// Most processes in one reply.
pub const MAX_LISTED: usize = 100;
/// The device that every machine has.
pub const CPU: &str = "cpu";

/// How a process is to be served. Shares are in millionths of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Class {
    /// A little, at once.
    Interactive,
    /// This part of the device, whatever others do.
    Custom(u32),
    /// An equal part of the rest, weighted by nice.
    Normal,
    /// What is left over.
    Background,
    /// Nothing.
    Suspended,
}

impl Class {
    /// Its place in [`crate::page::DeviceLoad::classes`].
    pub fn index(self) -> usize {
        match self {
            Class::Interactive => 0,
            Class::Custom(_) => 1,
            Class::Normal => 2,
            Class::Background => 3,
            Class::Suspended => 4,
        }
    }
}

impl std::fmt::Display for Class {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Class::Interactive => f.pad("interactive"),
            Class::Custom(_) => f.pad("custom"),
            Class::Normal => f.pad("normal"),
            Class::Background => f.pad("background"),
            Class::Suspended => f.pad("suspended"),
        }
    }
}

/// What a program asks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Request {
    /// The first message.
    Hello {
        /// [`VERSION`].
        version: u16,
        /// What to call the program, for people.
        name: String,
    },
    /// Asks for an account on a device.
    Join {
        /// [`CPU`], or the name of another device of the service's.
        device: String,
    },
    /// Gives an account back.
    Leave {
        /// Its number.
        account: u8,
    },
    /// Sets how a process is served, on every device and until it ends.
    Set {
        /// The process.
        pid: u32,
        /// Its class, if that is to change.
        class: Option<Class>,
        /// Its nice value here, -20 to 19, if that is to change.
        nice: Option<i8>,
    },
    /// Bounds a process's memory on each GPU whose time the service divides: one that has more is ended.
    Limit {
        /// The process.
        pid: u32,
        /// The most, bytes; none takes the limit away.
        memory: Option<u64>,
    },
    /// Gives a suspended process the class back that it had.
    Resume {
        /// The process.
        pid: u32,
    },
    /// Asks for the processes with higher numbers than `after`, in their order.
    List {
        /// 0 for the first.
        after: u32,
    },
    /// Asks for the devices.
    Devices,
    /// Joins a group of this user's programs that share GPUs in space, under NVIDIA MPS.
    CoRun {
        /// The group's name: 1 to 32 letters, digits, `-` and `_`.
        group: String,
        /// The group's class, if that is to change.
        class: Option<Class>,
        /// The group's nice value, if that is to change.
        nice: Option<i8>,
    },
    /// As `Join`, of a device that the service need not know yet: it is shared by those who bring it.
    Bring {
        /// A name that all programs of the device have for it.
        device: String,
    },
}

/// What the service answers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Reply {
    /// To `Hello`; with the files of the global page, the private page, the program's page and the doorbell.
    Welcome {
        /// The service's version, for people.
        service: String,
        /// Milliseconds since it started.
        up_ms: u64,
    },
    /// To `Join`.
    Joined {
        /// The account's number.
        account: u8,
        /// Whether the kernel measures its use. If not, the program has to say it.
        metered: bool,
    },
    /// Done.
    Done,
    /// Not done, and why.
    Refused(Refusal),
    /// To `List`.
    Processes {
        /// At most [`MAX_LISTED`].
        processes: Vec<Process>,
        /// Whether there are more.
        more: bool,
    },
    /// To `Devices`.
    Devices(Vec<Device>),
    /// To `CoRun`: where the group's control daemon is to be found, perhaps in a moment.
    CoRuns {
        /// Its `CUDA_MPS_PIPE_DIRECTORY`.
        pipe: String,
        /// Its `CUDA_MPS_LOG_DIRECTORY`.
        log: String,
    },
}

/// Why something was refused.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
pub enum Refusal {
    /// The user may not.
    #[error("not permitted: {0}")]
    NotPermitted(String),
    /// The process is not there.
    #[error("there is no process {0}")]
    NoProcess(u32),
    /// The device is not there.
    #[error("there is no device {0:?}")]
    NoDevice(String),
    /// Custom shares would be more than the whole.
    #[error("{} % asked for, {} % of {device} are free", *.wanted as f64 / 1e4, *.free as f64 / 1e4)]
    Overbooked {
        /// The device.
        device: String,
        /// Asked for, in millionths.
        wanted: u64,
        /// Free, in millionths.
        free: u64,
    },
    /// A limit.
    #[error("the limit of {limit} {what} is reached")]
    Limit {
        /// On what.
        what: String,
        /// The limit.
        limit: u64,
    },
    /// A value that makes no sense.
    #[error("{0}")]
    Invalid(String),
    /// The group has had no program for a while and is about to end; it can be had anew in a moment.
    #[error("co-run group {0:?} is just ending")]
    Ending(String),
    /// Nothing here could hold a process to it.
    #[error("{0}")]
    Unenforceable(String),
    /// The control daemon of MPS could not be started.
    #[error("{0}")]
    NoMps(String),
}

/// Where a number is from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Source {
    /// The operating system's accounts of the process.
    Kernel,
    /// The GPU's own log of context switches.
    Switches,
    /// NVML's samples.
    Nvml,
    /// The program says so.
    Program,
}

/// How shares are enforced.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Level {
    /// Suspension and slices.
    Hardware,
    /// The driver's process lock.
    Lock,
    /// The program asks for credit.
    Credit,
}

/// A process on a device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Process {
    /// Its number.
    pub pid: u32,
    /// Its user.
    pub uid: u32,
    /// Its name.
    pub name: String,
    /// The device.
    pub device: String,
    /// Its class.
    pub class: Class,
    /// Its nice value here.
    pub nice: i8,
    /// Whether it has work.
    pub active: bool,
    /// Whether it waits for credit, or its turn.
    pub waiting: bool,
    /// What it would get of the device now, in millionths.
    pub share: u64,
    /// What it has had lately, in millionths.
    pub used: u64,
    /// What it has used since it began, ns.
    pub spent_ns: u64,
    /// Where that number is from.
    pub source: Source,
    /// How often it has come onto the device, where that is known.
    pub switches: Option<u64>,
    /// Time for which it was kept off the device since it is known, ns, where that is counted.
    pub off_ns: Option<u64>,
    /// How its share is enforced.
    pub level: Level,
    /// The most memory that it may have on the device, bytes, where it has a limit and the service sees to it.
    pub memory_limit: Option<u64>,
}

/// A device of the service.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Device {
    /// Its name, for [`Request::Join`].
    pub name: String,
    /// Its place on the global page.
    pub index: u8,
    /// Things that it does at a time.
    pub units: u32,
    /// How shares are enforced on it.
    pub level: Level,
}

/// A process's class, for a restart of the service.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Saved {
    /// The process.
    pub pid: u32,
    /// When it began.
    pub began: u64,
    /// Its class.
    pub class: Class,
    /// The class to go back to.
    pub before: Class,
    /// Its nice value.
    pub nice: i8,
    /// As far as its user may set both.
    pub ceiling: (Class, i8),
    /// Its limit of memory, and the highest that its user may set, bytes.
    #[serde(default)]
    pub memory: [Option<u64>; 2],
    /// Its co-run group, and what it is there: 0 the control daemon, 1 a server, 2 a program.
    #[serde(default)]
    pub group: Option<(String, u8)>,
    /// The folder of a control daemon.
    #[serde(default)]
    pub folder: Option<String>,
    /// Its clients of GPUs' drivers, as they call them: who is older than a service is hard to find for the next one.
    #[serde(default)]
    pub clients: Vec<u32>,
}

/// A packet that is no message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Malformed {
    /// Longer than a message can be.
    #[error("a message of {0} bytes is longer than any can be")]
    Long(usize),
    /// Not the encoding of one.
    #[error("not a message")]
    Encoding,
    /// Something comes behind it.
    #[error("{0} bytes behind the message")]
    Rest(usize),
}

/// Reads one message of at most `most` bytes.
///
/// # Errors
/// [`Malformed`].
pub fn decode<T: DeserializeOwned>(bytes: &[u8], most: usize) -> Result<T, Malformed> {
    if bytes.len() > most {
        return Err(Malformed::Long(bytes.len()));
    }
    let (message, rest) = postcard::take_from_bytes(bytes).map_err(|_| Malformed::Encoding)?;
    if rest.is_empty() { Ok(message) } else { Err(Malformed::Rest(rest.len())) }
}

/// Writes one message.
pub fn encode<T: Serialize>(message: &T) -> Vec<u8> {
    // Only a type whose length is unknown could fail, and there is none; what came out empty is no message.
    postcard::to_stdvec(message).unwrap_or_default()
}

/// At most [`MAX_NAME`] bytes of a name, on one line.
pub fn short_name(name: &str) -> String {
    let mut short: String = name.chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
    while short.len() > MAX_NAME {
        short.pop();
    }
    short
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn messages_survive_and_everything_else_is_refused() {
        let all = [
            Request::Hello { version: VERSION, name: "x".into() },
            Request::Set { pid: 7, class: Some(Class::Custom(10)), nice: Some(-3) },
            Request::Limit { pid: 7, memory: Some(u64::MAX) },
            Request::List { after: 0 },
            Request::Bring { device: "gpu".into() },
        ];
        for m in all {
            let bytes = encode(&m);
            assert_eq!(decode::<Request>(&bytes, MAX_REQUEST), Ok(m));
            for cut in 0..bytes.len() {
                assert!(decode::<Request>(&bytes[..cut], MAX_REQUEST).is_err());
            }
            let longer = [&bytes[..], &[0]].concat();
            assert_eq!(decode::<Request>(&longer, MAX_REQUEST), Err(Malformed::Rest(1)));
        }
        assert_eq!(decode::<Request>(&[0; MAX_REQUEST + 1], MAX_REQUEST), Err(Malformed::Long(MAX_REQUEST + 1)));
        // A length that promises more than there is must not be believed.
        assert!(decode::<Request>(&[0, 1, 0xff, 0xff, 0xff, 0xff, 0x0f], MAX_REQUEST).is_err());
    }

    #[test]
    fn the_longest_reply_fits() {
        let p = Process {
            pid: u32::MAX,
            uid: u32::MAX,
            name: "n".repeat(MAX_NAME),
            device: "d".repeat(MAX_NAME),
            class: Class::Custom(u32::MAX),
            nice: -20,
            active: true,
            waiting: true,
            share: u64::MAX,
            used: u64::MAX,
            spent_ns: u64::MAX,
            source: Source::Program,
            switches: Some(3),
            off_ns: None,
            level: Level::Credit,
            memory_limit: Some(u64::MAX),
        };
        let reply = Reply::Processes { processes: vec![p; MAX_LISTED], more: true };
        assert!(encode(&reply).len() <= MAX_REPLY);
    }

    #[test]
    fn names_are_cut_between_characters_and_stay_on_their_line() {
        assert_eq!(short_name("a\nb\x1b[1m"), "a b [1m");
        let long = short_name(&"ä".repeat(100));
        assert_eq!(long, "ä".repeat(MAX_NAME / 2));
    }

    proptest! {
        #[test]
        fn any_bytes_are_a_message_or_not(bytes in proptest::collection::vec(any::<u8>(), 0..600)) {
            if let Ok(m) = decode::<Request>(&bytes, MAX_REQUEST) {
                prop_assert_eq!(decode::<Request>(&encode(&m), MAX_REQUEST), Ok(m));
            }
            let _ = decode::<Reply>(&bytes, MAX_REPLY);
        }
    }
}
