//! AES-256-XTS over sectors of 4 KiB, as disk encryption uses it (IEEE 1619).
//!
//! On the CPU the library's code with the processor's AES instructions; on accelerators one work-item a block, with
//! tables. A block's tweak is its sector's, encrypted on the host, times x to the power of its place.

use ::aes::Aes256;
use ::aes::cipher::generic_array::GenericArray;
use ::aes::cipher::{BlockEncrypt as _, KeyInit as _};
use forebay::{Arg, Geometry, Graph, Kind, Launch, Source, Task, TaskId, Template};

/// Bytes of a sector.
pub const SECTOR: usize = 4096;
/// Words of the tables: Te0, Td0, and both S-boxes, a word an entry.
const TABLES: usize = 4 * 256;
/// Words of a key schedule of AES-256: 15 round keys.
const SCHEDULE: usize = 60;

/// Which way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// Plain to cipher.
    Encrypt,
    /// Cipher to plain.
    Decrypt,
}

/// A key: that of the data and that of the tweaks.
#[derive(Clone)]
pub struct Key {
    data: [u8; 32],
    tweak: [u8; 32],
}

impl Key {
    /// A key from 64 bytes.
    pub fn new(bytes: &[u8; 64]) -> Self {
        let mut key = Key { data: [0; 32], tweak: [0; 32] };
        key.data.copy_from_slice(&bytes[..32]);
        key.tweak.copy_from_slice(&bytes[32..]);
        key
    }

    /// The encrypted tweaks of `n` sectors from `first` on, 16 bytes each.
    pub fn tweaks(&self, first: u64, n: usize) -> Vec<u8> {
        let cipher = Aes256::new(GenericArray::from_slice(&self.tweak));
        let mut out = vec![0u8; 16 * n];
        for (i, block) in out.chunks_exact_mut(16).enumerate() {
            block[..8].copy_from_slice(&(first + i as u64).to_le_bytes());
            cipher.encrypt_block(GenericArray::from_mut_slice(block));
        }
        out
    }

    /// The round keys as words, most significant byte first; those of decryption transformed and in reverse, so that both
    /// ways have the same rounds.
    fn schedule(&self, way: Way, t: &Tables) -> [u32; SCHEDULE] {
        let sub = |w: u32| u32::from_be_bytes(w.to_be_bytes().map(|b| t.sbox[b as usize]));
        let mut w = [0u32; SCHEDULE];
        for (to, b) in w.iter_mut().zip(self.data.chunks_exact(4)) {
            *to = u32::from_be_bytes([b[0], b[1], b[2], b[3]]);
        }
        let mut rcon = 1u32;
        for i in 8..SCHEDULE {
            let mut x = w[i - 1];
            if i % 8 == 0 {
                x = sub(x.rotate_left(8)) ^ (rcon << 24);
                rcon <<= 1;
            } else if i % 8 == 4 {
                x = sub(x);
            }
            w[i] = w[i - 8] ^ x;
        }
        if way == Way::Encrypt {
            return w;
        }
        let mut d = [0u32; SCHEDULE];
        for (round, keys) in d.chunks_exact_mut(4).enumerate() {
            let from = &w[4 * (14 - round)..][..4];
            for (to, k) in keys.iter_mut().zip(from) {
                // Td of S-box entries undoes the S-box and mixes the columns back.
                let mixed = k.to_be_bytes().map(|b| t.td[t.sbox[b as usize] as usize]);
                let [a, b, c, e] = mixed;
                let back = a ^ b.rotate_right(8) ^ c.rotate_right(16) ^ e.rotate_right(24);
                *to = if round == 0 || round == 14 { *k } else { back };
            }
        }
        d
    }
}

struct Tables {
    sbox: [u8; 256],
    inverse: [u8; 256],
    te: [u32; 256],
    td: [u32; 256],
}

/// Product in AES's field.
fn times(mut a: u8, mut b: u8) -> u8 {
    let mut p = 0;
    while b != 0 {
        if b & 1 != 0 {
            p ^= a;
        }
        a = (a << 1) ^ if a & 0x80 != 0 { 0x1B } else { 0 };
        b >>= 1;
    }
    p
}

impl Tables {
    fn new() -> Self {
        let mut t = Tables { sbox: [0; 256], inverse: [0; 256], te: [0; 256], td: [0; 256] };
        for x in 0..=255u8 {
            let inverse = (0..=255u8).find(|y| times(x, *y) == 1).unwrap_or(0);
            let r = |n| inverse.rotate_left(n);
            let s = inverse ^ r(1) ^ r(2) ^ r(3) ^ r(4) ^ 0x63;
            t.sbox[x as usize] = s;
            t.inverse[s as usize] = x;
        }
        for x in 0..256 {
            let (s, i) = (t.sbox[x], t.inverse[x]);
            t.te[x] = u32::from_be_bytes([times(s, 2), s, s, times(s, 3)]);
            t.td[x] = u32::from_be_bytes([times(i, 14), times(i, 9), times(i, 13), times(i, 11)]);
        }
        t
    }

    fn words(&self) -> Vec<u32> {
        let wide = |b: &[u8; 256]| b.map(u32::from);
        [self.te, self.td, wide(&self.sbox), wide(&self.inverse)].concat()
    }
}

const SOURCE: &str = include_str!("aes.cl");

/// Adds a task with ports `data` (in and out), `tweaks`, and the sticky ports `key` and `tables`, for `sectors` sectors.
pub fn task(g: &mut Graph, key: &Key, way: Way, sectors: usize, device: Kind) -> forebay::Result<TaskId> {
    let data = Template::array::<u32>([sectors * SECTOR / 4]);
    let tweaks = Template::array::<u32>([sectors * 4]);
    let task = Task::new(if way == Way::Encrypt { "encrypt" } else { "decrypt" });
    let task = task.inout("data", data).input("tweaks", tweaks);
    if device == Kind::Cpu {
        return g.add(by_instructions(task, key, way));
    }
    let (schedule, tables) = (Template::array::<u32>([SCHEDULE]), Template::array::<u32>([TABLES]));
    let task = task.sticky("key", schedule).sticky("tables", tables);
    g.add(task.kernels(device, [kernel(way, sectors)]))
}

/// The encryption as a task for any device, called by itself: `data` (in and out), `tweaks`, `key` and `tables`.
pub fn anywhere(key: &Key, sectors: usize) -> Task {
    let task = Task::new("aes")
        .inout("data", Template::array::<u32>([sectors * SECTOR / 4]))
        .input("tweaks", Template::array::<u32>([sectors * 4]))
        .input("key", Template::array::<u32>([SCHEDULE]))
        .input("tables", Template::array::<u32>([TABLES]));
    let launch = kernel(Way::Encrypt, sectors);
    let task = task.kernels(Kind::OpenCl, [launch.clone()]).kernels(Kind::Cuda, [launch]);
    by_instructions(task, key, Way::Encrypt)
}

/// On the CPU: sector by sector, each with its own tweak, as the kernel does it.
fn by_instructions(task: Task, key: &Key, way: Way) -> Task {
    let key = key.clone();
    task.host(move |inv| {
        let tweaks = bytemuck::cast_slice(inv.input::<u32>("tweaks")?);
        sectors(&key, way, bytemuck::cast_slice_mut(inv.output::<u32>("data")?), tweaks);
        Ok(())
    })
}

/// The same on the core that calls: `data` in place, with sixteen bytes of `tweaks` for each sector.
pub fn sectors(key: &Key, way: Way, data: &mut [u8], tweaks: &[u8]) {
    let cipher = Aes256::new(GenericArray::from_slice(&key.data));
    for (sector, tweak) in data.chunks_exact_mut(SECTOR).zip(tweaks.chunks_exact(16)) {
        let mut t = [0u8; 16];
        t.copy_from_slice(tweak);
        xts_sector(&cipher, way, sector, u128::from_le_bytes(t));
    }
}

/// On accelerators: a work-item for each block of 16 bytes.
fn kernel(way: Way, sectors: usize) -> Launch {
    let entry = if way == Way::Encrypt { "aes_xts_encrypt" } else { "aes_xts_decrypt" };
    let args = ["data", "tweaks", "key", "tables"].map(Arg::port).into_iter().chain([Arg::Items(0)]);
    Launch::new(Source::Portable(SOURCE.into()), entry, args).over(Geometry::linear(sectors * SECTOR / 16))
}

/// One sector with the processor's AES instructions, eight blocks at a time.
fn xts_sector(cipher: &Aes256, way: Way, sector: &mut [u8], mut tweak: u128) {
    use ::aes::cipher::BlockDecrypt as _;
    for eight in sector.chunks_mut(128) {
        let mut tweaks = [0u128; 8];
        for t in &mut tweaks {
            *t = tweak;
            // Times x, modulo x^128 + x^7 + x^2 + x + 1.
            tweak = (tweak << 1) ^ if tweak >> 127 != 0 { 0x87 } else { 0 };
        }
        let mix = |eight: &mut [u8]| {
            for (b, t) in eight.chunks_exact_mut(16).zip(&tweaks) {
                b.iter_mut().zip(t.to_le_bytes()).for_each(|(b, t)| *b ^= t);
            }
        };
        mix(eight);
        let mut blocks = [GenericArray::default(); 8];
        blocks.iter_mut().zip(eight.chunks_exact(16)).for_each(|(to, from)| to.copy_from_slice(from));
        match way {
            Way::Encrypt => cipher.encrypt_blocks(&mut blocks),
            Way::Decrypt => cipher.decrypt_blocks(&mut blocks),
        }
        blocks.iter().zip(eight.chunks_exact_mut(16)).for_each(|(from, to)| to.copy_from_slice(from));
        mix(eight);
    }
}

/// What the sticky ports take: the key schedule and the tables.
pub fn constants(key: &Key, way: Way) -> (Vec<u32>, Vec<u32>) {
    let t = Tables::new();
    (key.schedule(way, &t).to_vec(), t.words())
}

#[cfg(test)]
mod tests {
    use super::*;
    use forebay::{Datablock, Runtime};
    use xts_mode::{Xts128, get_tweak_default};

    fn key() -> Key {
        let mut bytes = [0u8; 64];
        bytes.iter_mut().enumerate().for_each(|(i, b)| *b = (i * 37 + 11) as u8);
        Key::new(&bytes)
    }

    fn through(device: Kind, way: Way, data: &[u8], first: u64) -> Option<Vec<u8>> {
        let rt = Runtime::builder().only(device).ok()?.build().unwrap();
        let sectors = data.len() / SECTOR;
        let mut g = Graph::new("aes");
        let id = task(&mut g, &key(), way, sectors, device).unwrap();
        let (feed, tweaks) = (g.feed((id, "data"), 1).unwrap(), g.feed((id, "tweaks"), 1).unwrap());
        let drain = g.drain((id, "data"), 1).unwrap();
        let constant =
            (device != Kind::Cpu).then(|| (g.feed((id, "key"), 1).unwrap(), g.feed((id, "tables"), 1).unwrap()));
        let run = rt.start(g).unwrap();
        let block = |bytes: &[u8]| {
            let words: Vec<u32> = bytemuck::pod_collect_to_vec(bytes);
            Datablock::from_slice(Template::array::<u32>([words.len()]), &words).unwrap()
        };
        if let Some((k, t)) = constant {
            let (schedule, tables) = constants(&key(), way);
            run.push(k, block(bytemuck::cast_slice(&schedule))).unwrap();
            run.push(t, block(bytemuck::cast_slice(&tables))).unwrap();
        }
        run.push(tweaks, block(&key().tweaks(first, sectors))).unwrap();
        run.push(feed, block(data)).unwrap();
        Some(bytemuck::cast_slice(run.pull(drain).unwrap().as_slice::<u32>().unwrap()).to_vec())
    }

    #[test]
    fn every_device_encrypts_and_decrypts_as_the_library_does() {
        let plain: Vec<u8> = (0..5 * SECTOR as u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 23) as u8).collect();
        // A sector number beyond 32 bits, too.
        for first in [0, 7, (1 << 40) + 3] {
            let mut cipher = plain.clone();
            let half = |k: &[u8; 32]| Aes256::new(GenericArray::from_slice(k));
            let xts = Xts128::new(half(&key().data), half(&key().tweak));
            xts.encrypt_area(&mut cipher, SECTOR, u128::from(first), get_tweak_default);
            assert!(cipher != plain);
            for device in [Kind::Cpu, Kind::OpenCl, Kind::Cuda] {
                let Some(ours) = through(device, Way::Encrypt, &plain, first) else {
                    eprintln!("skipped: no {device} device here");
                    continue;
                };
                assert!(ours == cipher, "{device}: encryption from sector {first}");
                let back = through(device, Way::Decrypt, &cipher, first).unwrap();
                assert!(back == plain, "{device}: decryption from sector {first}");
            }
        }
    }
}
