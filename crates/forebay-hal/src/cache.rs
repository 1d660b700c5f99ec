//! Compiled kernels on disk, found again by content.
//!
//! An entry's name is the SHA-256 of everything that decides the binary: source, options, device, driver. An entry is a
//! header (magic, length, SHA-256 of the payload) and the payload; anything that does not match is treated as absent,
//! removed and rebuilt. Files are written beside their place and renamed, so a reader never sees half an entry.

use std::collections::HashMap;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use sha2::{Digest, Sha256};

use crate::Result;

const MAGIC: &[u8; 8] = b"FBKERN01";
const HEADER: usize = 8 + 8 + 32;
/// Largest entry that is read back: far above any real kernel, far below what would hurt.
const MAX_ENTRY: u64 = 256 << 20;

/// A folder of compiled kernels.
#[derive(Clone, Debug)]
pub struct Cache {
    dir: Option<PathBuf>,
}

impl Cache {
    /// The user's cache: `$FOREBAY_CACHE`, else `$XDG_CACHE_HOME/forebay/kernels`, else `~/.cache/forebay/kernels`.
    /// With none of these there is no cache and everything is compiled anew. `FOREBAY_CACHE=off` switches it off.
    pub fn user() -> Self {
        let dir = match std::env::var_os("FOREBAY_CACHE") {
            Some(v) if v == "off" => None,
            Some(v) => Some(PathBuf::from(v)),
            None => std::env::var_os("XDG_CACHE_HOME")
                .map(PathBuf::from)
                .or_else(|| std::env::var_os("HOME").map(|h| PathBuf::from(h).join(".cache")))
                .map(|d| d.join("forebay").join("kernels")),
        };
        Cache { dir }
    }

    /// A cache in a folder of its own.
    pub fn at(dir: impl Into<PathBuf>) -> Self {
        Cache { dir: Some(dir.into()) }
    }

    /// No cache: nothing is found and nothing stored.
    pub fn off() -> Self {
        Cache { dir: None }
    }

    /// The key of an entry: all `parts`, each with its length, hashed.
    pub fn key(parts: &[&[u8]]) -> String {
        let mut h = Sha256::new();
        for p in parts {
            h.update((p.len() as u64).to_le_bytes());
            h.update(p);
        }
        hex(&h.finalize())
    }

    fn path(&self, key: &str) -> Option<PathBuf> {
        self.dir.as_ref().map(|d| d.join(key))
    }

    /// The payload stored under `key`, if it is there and intact; a damaged entry is removed.
    pub fn get(&self, key: &str) -> Option<Vec<u8>> {
        let path = self.path(key)?;
        if std::fs::metadata(&path).ok()?.len() > MAX_ENTRY {
            return None;
        }
        let bytes = std::fs::read(&path).ok()?;
        let intact = bytes.len() >= HEADER
            && &bytes[..8] == MAGIC
            && bytes[8..16] == ((bytes.len() - HEADER) as u64).to_le_bytes()
            && bytes[16..HEADER] == Sha256::digest(&bytes[HEADER..])[..];
        if intact {
            return Some(bytes[HEADER..].to_vec());
        }
        let _ = std::fs::remove_file(&path);
        None
    }

    /// Stores `payload` under `key`. A cache that cannot be written is a slow cache, not an error.
    pub fn put(&self, key: &str, payload: &[u8]) {
        if let Some(path) = self.path(key) {
            let _ = write_entry(&path, payload);
        }
    }
}

fn write_entry(path: &Path, payload: &[u8]) -> std::io::Result<()> {
    let dir = path.parent().unwrap_or(Path::new("."));
    std::fs::create_dir_all(dir)?;
    let unique = format!(".{}.{:?}.part", std::process::id(), std::thread::current().id());
    let part = path.with_extension(unique.trim_start_matches('.'));
    let mut f = std::fs::File::create(&part)?;
    f.write_all(MAGIC)?;
    f.write_all(&(payload.len() as u64).to_le_bytes())?;
    f.write_all(&Sha256::digest(payload))?;
    f.write_all(payload)?;
    drop(f);
    std::fs::rename(&part, path)
}

fn hex(bytes: &[u8]) -> String {
    use std::fmt::Write;
    bytes.iter().fold(String::new(), |mut s, b| {
        let _ = write!(s, "{b:02x}");
        s
    })
}

/// What a device has compiled and somebody still uses, by key: a graph of a thousand tasks with one kernel loads it once.
pub struct Loaded<T>(Mutex<HashMap<String, Weak<T>>>);

impl<T> Default for Loaded<T> {
    fn default() -> Self {
        Loaded(Mutex::default())
    }
}

impl<T> Loaded<T> {
    /// What is there under `key`, or what `make` makes; one at a time, so that nothing is compiled twice.
    ///
    /// # Errors
    /// Those of `make`.
    pub fn get_or(&self, key: &str, make: impl FnOnce() -> Result<T>) -> Result<Arc<T>> {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(there) = all.get(key).and_then(Weak::upgrade) {
            return Ok(there);
        }
        let made = Arc::new(make()?);
        all.retain(|_, w| w.strong_count() > 0);
        all.insert(key.into(), Arc::downgrade(&made));
        Ok(made)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_entry_comes_back_and_damage_makes_it_absent() {
        let dir = std::env::temp_dir().join(format!("forebay-cache-{}", std::process::id()));
        let cache = Cache::at(&dir);
        let key = Cache::key(&[b"source", b"device"]);
        assert_eq!(cache.get(&key), None);
        cache.put(&key, b"binary");
        assert_eq!(cache.get(&key).as_deref(), Some(&b"binary"[..]));
        let path = dir.join(&key);
        let good = std::fs::read(&path).unwrap();
        for at in [0, 9, 20, good.len() - 1] {
            let mut bad = good.clone();
            bad[at] ^= 1;
            std::fs::write(&path, &bad).unwrap();
            assert_eq!(cache.get(&key), None, "damage at byte {at} went unnoticed");
            assert!(!path.exists());
        }
        std::fs::write(&path, &good[..10]).unwrap();
        assert_eq!(cache.get(&key), None);
        std::fs::remove_dir_all(&dir).unwrap();
    }

    #[test]
    fn keys_do_not_depend_on_where_parts_are_joined() {
        assert_ne!(Cache::key(&[b"ab", b"c"]), Cache::key(&[b"a", b"bc"]));
    }
}
