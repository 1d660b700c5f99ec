//! Models on disk: a file for each task and device, named by what decides its times.
//!
//! A file is TOML with a version; what is damaged, empty, of another version or says what cannot be counts as absent. Files are
//! written beside their place and renamed: of two processes that write at once one is last, and nobody reads half a file.

use std::collections::HashMap;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use forebay_hal::cache::Cache;
use serde::{Deserialize, Serialize};

use super::model::{Model, Sample};

const VERSION: u32 = 1;
/// Largest file that is read.
const MAX_FILE: u64 = 1 << 20;
/// Most samples that are believed.
const MAX_SAMPLES: usize = 1000;

/// What a file has.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Entry {
    version: u32,
    /// The task.
    pub task: String,
    /// The device, with its kind and driver.
    pub device: String,
    /// Its measured invocations.
    pub samples: Vec<Sample>,
}

/// The models of a process, and the folder where they stay.
pub struct Models {
    dir: Option<PathBuf>,
    open: Mutex<HashMap<String, Arc<Model>>>,
}

/// Names a model: everything that decides its times.
pub(crate) struct Key<'a> {
    pub(crate) task: &'a str,
    pub(crate) device: &'a str,
    /// Source of the kernels; of functions of the program, the program.
    pub(crate) content: &'a [u8],
}

impl Key<'_> {
    fn name(&self) -> String {
        // Code without optimisation has times of its own.
        let built = if cfg!(debug_assertions) { "debug" } else { "release" };
        let hash = Cache::key(&[self.task.as_bytes(), self.device.as_bytes(), self.content, built.as_bytes()]);
        hash[..32].to_owned()
    }
}

impl Models {
    /// The user's: `$FOREBAY_MODELS`, else beside the cache of kernels; none when `FOREBAY_MODELS` is `off`, or there is no
    /// such place.
    pub fn user() -> Self {
        let dir = match std::env::var_os("FOREBAY_MODELS") {
            Some(v) if v == "off" => None,
            Some(v) => Some(PathBuf::from(v)),
            None => std::env::var_os("XDG_CACHE_HOME")
                .map(PathBuf::from)
                .or_else(|| std::env::var_os("HOME").map(|h| PathBuf::from(h).join(".cache")))
                .map(|d| d.join("forebay").join("models")),
        };
        Models { dir, open: Mutex::default() }
    }

    /// In a folder of its own.
    pub fn at(dir: impl Into<PathBuf>) -> Self {
        Models { dir: Some(dir.into()), open: Mutex::default() }
    }

    /// Kept nowhere.
    pub fn off() -> Self {
        Models { dir: None, open: Mutex::default() }
    }

    fn path(&self, name: &str) -> Option<PathBuf> {
        self.dir.as_ref().map(|d| d.join(format!("{name}.toml")))
    }

    /// The model of a task on a device, as it was left; a new one if there is none.
    pub(crate) fn get(&self, key: &Key<'_>) -> Arc<Model> {
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        open.entry(key.name())
            .or_insert_with_key(|name| {
                let model = Model::default();
                if let Some(e) = self.path(name).and_then(|p| read(&p)) {
                    model.import(e.samples);
                }
                Arc::new(model)
            })
            .clone()
    }

    /// Writes a model down. One that cannot be written is learned anew next time.
    pub(crate) fn put(&self, key: &Key<'_>, model: &Model) {
        let samples = model.export();
        let Some(path) = self.path(&key.name()).filter(|_| !samples.is_empty()) else { return };
        let entry = Entry { version: VERSION, task: key.task.to_owned(), device: key.device.to_owned(), samples };
        let Ok(text) = toml::to_string(&entry) else { return };
        // What is not renamed in the end is gone with its handle.
        let write = |dir: &Path| {
            std::fs::create_dir_all(dir)?;
            let mut part = tempfile::NamedTempFile::new_in(dir)?;
            part.write_all(text.as_bytes())?;
            part.persist(&path).map(drop).map_err(|e| e.error)
        };
        _ = path.parent().map(write);
    }

    /// Everything on disk that can be read, by task and device.
    pub fn entries(&self) -> Vec<Entry> {
        let mut all: Vec<Entry> = self.files().iter().filter_map(|p| read(p)).collect();
        all.sort_by(|a, b| (&a.task, &a.device).cmp(&(&b.task, &b.device)));
        all
    }

    /// Removes the models of a task, or all of them; how many.
    pub fn reset(&self, task: Option<&str>) -> usize {
        let mut n = 0;
        for p in self.files() {
            // What cannot be read belongs to nobody.
            let is = task.is_none_or(|t| read(&p).is_none_or(|e| e.task == t));
            n += usize::from(is && std::fs::remove_file(&p).is_ok());
        }
        n
    }

    fn files(&self) -> Vec<PathBuf> {
        let Some(dir) = &self.dir else { return Vec::new() };
        let files = std::fs::read_dir(dir).into_iter().flatten().flatten().map(|f| f.path());
        files.filter(|p| p.extension().is_some_and(|e| e == "toml")).collect()
    }
}

fn read(path: &Path) -> Option<Entry> {
    let size = std::fs::metadata(path).ok()?.len();
    let text = (size <= MAX_FILE).then(|| std::fs::read_to_string(path).ok())??;
    let e: Entry = toml::from_str(&text).ok()?;
    (e.version == VERSION && e.samples.len() <= MAX_SAMPLES).then_some(e)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn models_come_back_and_bad_files_are_absent() {
        let dir = std::env::temp_dir().join(format!("forebay-models-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&dir);
        let key = Key { task: "t", device: "cpu", content: b"source" };
        let models = Models::at(&dir);
        let m = models.get(&key);
        for i in 0..5 {
            m.record(Sample { size: 1000, hint: 0.0, ns: 500.0 + f64::from(i) });
        }
        models.put(&key, &m);
        assert_eq!(Models::at(&dir).get(&key).predict(1000, 0.0), m.predict(1000, 0.0));
        assert!(Arc::ptr_eq(&models.get(&key), &m));
        // Another source, device or task is another model.
        for other in [
            Key { task: "t", device: "cpu", content: b"other" },
            Key { task: "t", device: "gpu", content: b"source" },
            Key { task: "u", device: "cpu", content: b"source" },
        ] {
            assert_eq!(models.get(&other).predict(1000, 0.0), None);
        }
        let file = models.files().remove(0);
        let good = std::fs::read_to_string(&file).unwrap();
        let huge = format!("{good}#{}", "x".repeat(MAX_FILE as usize));
        for bad in ["", "version = 1", &good[..good.len() / 2], &good.replace("version = 1", "version = 2"), &huge] {
            std::fs::write(&file, bad).unwrap();
            assert_eq!(Models::at(&dir).get(&key).predict(1000, 0.0), None, "{}", &bad[..bad.len().min(50)]);
        }
        std::fs::write(&file, good.replace("ns = 50", "ns = -50")).unwrap();
        assert_eq!(Models::at(&dir).get(&key).predict(1000, 0.0), None);
        models.put(&key, &m);
        // Two who write at once: whole files only.
        std::thread::scope(|s| {
            let both = [0; 2].map(|_| s.spawn(|| (0..1000).for_each(|_| models.put(&key, &m))));
            while !both.iter().all(|w| w.is_finished()) {
                assert!(matches!(read(&file), Some(e) if e.samples.len() == 4 || e.samples.len() == 5));
            }
        });
        assert_eq!((models.entries().len(), models.reset(Some("u")), models.reset(None)), (1, 0, 1));
        std::fs::remove_dir_all(dir).unwrap();
    }
}
