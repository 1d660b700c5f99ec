//! Another of the programs: it writes a file sector by sector encrypted, reads it back and compares, without end, as an
//! encrypted file system would on whose device others work, too (PTask section 6.4).

use std::collections::VecDeque;
use std::fs::File;
use std::os::unix::fs::FileExt as _;

use forebay::{Datablock, Drain, Feed, Graph, Kind, Running, Runtime, Template};

use crate::workloads::aes::{self, Key, SECTOR, Way};

/// Bytes of the file.
const BYTES: usize = 16 << 20;
/// What is read or written at a time: a large read-ahead.
pub const CHUNK: usize = 256 << 10;
const SECTORS: usize = CHUNK / SECTOR;
/// Chunks on their way.
const AHEAD: usize = 4;

/// A graph for one direction.
struct Cipher {
    run: Running,
    data: Feed,
    tweaks: Feed,
    out: Drain,
}

impl Cipher {
    fn new(rt: &Runtime, key: &Key, way: Way, device: Kind) -> forebay::Result<Self> {
        let mut g = Graph::new(if way == Way::Encrypt { "file, writing" } else { "file, reading" });
        let id = aes::task(&mut g, key, way, SECTORS, device)?;
        let (data, tweaks) = (g.feed((id, "data"), AHEAD)?, g.feed((id, "tweaks"), AHEAD)?);
        let out = g.drain((id, "data"), AHEAD)?;
        let constants = (device != Kind::Cpu)
            .then(|| Ok::<_, forebay::Error>((g.feed((id, "key"), 1)?, g.feed((id, "tables"), 1)?)));
        let constants = constants.transpose()?;
        let run = rt.start(g)?;
        if let Some((schedule, tables)) = constants {
            let (s, t) = aes::constants(key, way);
            run.push(schedule, words(&s)?)?;
            run.push(tables, words(&t)?)?;
        }
        Ok(Cipher { run, data, tweaks, out })
    }

    fn push(&self, key: &Key, bytes: &[u8], chunk: usize) -> forebay::Result<()> {
        let tweaks = key.tweaks((chunk * SECTORS) as u64, SECTORS);
        self.run.push(self.tweaks, words(&bytemuck::pod_collect_to_vec::<u8, u32>(&tweaks))?)?;
        self.run.push(self.data, words(&bytemuck::pod_collect_to_vec::<u8, u32>(bytes))?)
    }
}

fn words(w: &[u32]) -> forebay::Result<Datablock> {
    Datablock::from_slice(Template::array::<u32>([w.len()]), w)
}

/// The same bytes but for the first few: what is measured is not how they are made.
fn plain(pattern: &[u8], round: usize, chunk: usize) -> Vec<u8> {
    let mut bytes = pattern.to_vec();
    bytes[..16].copy_from_slice(&((round as u128) << 64 | chunk as u128).to_le_bytes());
    bytes
}

/// Runs until it is killed; calls `done` with every chunk that was written or read.
pub fn run(device: Kind, mut done: impl FnMut()) -> Result<(), String> {
    let text = |e: forebay::Error| e.to_string();
    let rt = Runtime::builder().only(device).map_err(text)?.build().map_err(text)?;
    let mut bytes = [0u8; 64];
    bytes.iter_mut().enumerate().for_each(|(i, b)| *b = (i * 101 + 7) as u8);
    let key = Key::new(&bytes);
    let path = std::env::temp_dir().join(format!("forebay-encrypted-{}", std::process::id()));
    let file = File::options().read(true).write(true).create_new(true).open(&path).map_err(|e| e.to_string())?;
    // Nobody else needs its name, and it goes with the process, however that ends.
    std::fs::remove_file(&path).map_err(|e| e.to_string())?;
    let io = |e: std::io::Error| format!("the encrypted file: {e}");
    let writer = Cipher::new(&rt, &key, Way::Encrypt, device).map_err(text)?;
    let reader = Cipher::new(&rt, &key, Way::Decrypt, device).map_err(text)?;
    let pattern: Vec<u8> = (0..CHUNK as u32).map(|i| i.wrapping_mul(2_654_435_761).to_be_bytes()[0]).collect();
    for round in 0.. {
        for cipher in [&writer, &reader] {
            let writing = std::ptr::eq(cipher, &writer);
            let mut ahead = VecDeque::new();
            for chunk in 0..BYTES / CHUNK + AHEAD {
                if chunk < BYTES / CHUNK {
                    let mut data = plain(&pattern, round, chunk);
                    if !writing {
                        file.read_exact_at(&mut data, (chunk * CHUNK) as u64).map_err(io)?;
                    }
                    cipher.push(&key, &data, chunk).map_err(text)?;
                    ahead.push_back(chunk);
                }
                if chunk + 1 < AHEAD {
                    continue;
                }
                let Some(chunk) = ahead.pop_front() else { break };
                let block = cipher.run.pull(cipher.out).map_err(text)?;
                let got: &[u8] = bytemuck::cast_slice(block.as_slice::<u32>().map_err(text)?);
                if writing {
                    file.write_all_at(got, (chunk * CHUNK) as u64).map_err(io)?;
                } else if got != plain(&pattern, round, chunk) {
                    return Err(format!("chunk {chunk} of the file came back changed"));
                }
                done();
            }
        }
    }
    Ok(())
}
