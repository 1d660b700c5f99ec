//! Words that one side writes and others read whole, without a lock between them.
//!
//! Rules:
//! 1. There is one writer. It makes the sequence odd, writes the words, and makes it even again.
//! 2. A reader takes the sequence, the words, and the sequence again: equal and even means that the words belong together.
//! 3. A reader gives up after [`TRIES`]: a writer that was killed leaves the sequence odd for ever.

use crate::sync::{AtomicU32, AtomicU64, Ordering, fence};

/// Attempts of a reader.
#[cfg(not(all(loom, test)))]
const TRIES: usize = 1000;
#[cfg(all(loom, test))]
const TRIES: usize = 2;

/// `N` words that are read whole. Any contents are valid, so it can lie in memory that somebody else writes.
#[repr(C)]
pub struct Words<const N: usize> {
    sequence: AtomicU32,
    _gap: AtomicU32,
    words: [AtomicU64; N],
}

impl<const N: usize> Words<N> {
    #[cfg(test)]
    fn new() -> Self {
        Words {
            sequence: AtomicU32::new(0),
            _gap: AtomicU32::new(0),
            words: std::array::from_fn(|_| AtomicU64::new(0)),
        }
    }

    /// Writes all words. There must be one writer only.
    pub fn write(&self, words: &[u64; N]) {
        // An odd sequence left by a writer that was killed is taken over as ours.
        let odd = self.sequence.load(Ordering::Relaxed) | 1;
        self.sequence.store(odd, Ordering::Relaxed);
        fence(Ordering::Release);
        for (to, w) in self.words.iter().zip(words) {
            to.store(*w, Ordering::Relaxed);
        }
        self.sequence.store(odd.wrapping_add(1), Ordering::Release);
    }

    /// Words that were written together; none when the writer is always in the middle of something.
    pub fn read(&self) -> Option<[u64; N]> {
        for _ in 0..TRIES {
            let before = self.sequence.load(Ordering::Acquire);
            let words = std::array::from_fn(|i| self.words[i].load(Ordering::Relaxed));
            fence(Ordering::Acquire);
            if before & 1 == 0 && self.sequence.load(Ordering::Relaxed) == before {
                return Some(words);
            }
            std::hint::spin_loop();
        }
        None
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn words_are_read_whole_while_they_are_written() {
        let w = Words::<8>::new();
        let done = std::sync::atomic::AtomicBool::new(false);
        std::thread::scope(|s| {
            s.spawn(|| {
                (0..200_000u64).for_each(|i| w.write(&[i; 8]));
                done.store(true, Ordering::Release);
            });
            let mut last = 0;
            while !done.load(Ordering::Acquire) {
                if let Some(r) = w.read() {
                    assert!(r.iter().all(|v| *v == r[0]), "{r:?}");
                    assert!(r[0] >= last);
                    last = r[0];
                }
            }
        });
        assert_eq!(w.read(), Some([199_999; 8]));
    }

    #[test]
    fn a_writer_that_died_in_the_middle_is_noticed_and_its_successor_goes_on() {
        let w = Words::<2>::new();
        w.write(&[1, 2]);
        w.sequence.store(3, Ordering::Relaxed);
        assert_eq!(w.read(), None);
        w.write(&[3, 4]);
        assert_eq!(w.read(), Some([3, 4]));
    }
}

#[cfg(all(test, loom))]
mod loom_tests {
    use super::*;
    use loom::sync::Arc;

    #[test]
    fn words_are_read_whole() {
        loom::model(|| {
            let w = Arc::new(Words::<2>::new());
            let writer = w.clone();
            let t = loom::thread::spawn(move || {
                writer.write(&[1, 1]);
                writer.write(&[2, 2]);
            });
            if let Some([a, b]) = w.read() {
                assert_eq!(a, b);
            }
            t.join().unwrap();
            assert_eq!(w.read(), Some([2, 2]));
        });
    }
}
