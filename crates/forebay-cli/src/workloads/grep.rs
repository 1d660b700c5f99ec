//! Where a word occurs in a text: how often in each stretch of it.

use forebay::{Arg, Geometry, Kind, Launch, Source, Task, Template};

/// What is looked for.
pub const WORD: [u8; 4] = *b"the ";
/// Bytes of a stretch.
pub const STRETCH: usize = 256;

const SOURCE: &str = "
KERNEL void find(GLOBAL const uchar *text, GLOBAL uint *found, uint n) {
  const uint begin = gid_x() * 256;
  if (begin >= n) return;
  uint count = 0;
  for (uint i = begin; i < begin + 256 && i + 4 <= n; i++)
    if (text[i] == 't' && text[i + 1] == 'h' && text[i + 2] == 'e' && text[i + 3] == ' ') count++;
  found[gid_x()] = count;
}
";

/// The task, for `n` bytes: `text` to a number for each stretch, `found`.
pub fn task(n: usize) -> Task {
    let stretches = n.div_ceil(STRETCH);
    let launch = || {
        let args = [Arg::port("text"), Arg::port("found"), Arg::records("text")];
        [Launch::new(Source::Portable(SOURCE.into()), "find", args).over(Geometry::linear(stretches))]
    };
    Task::new("grep")
        .input("text", Template::array::<u8>([n]))
        .output("found", Template::array::<u32>([stretches]))
        .kernels(Kind::OpenCl, launch())
        .kernels(Kind::Cuda, launch())
        .host(|inv| {
            find(inv.input("text")?, inv.output("found")?);
            Ok(())
        })
}

/// The same on the core that calls.
pub fn find(text: &[u8], found: &mut [u32]) {
    for (i, to) in found.iter_mut().enumerate() {
        // A word belongs to the stretch where it begins.
        let end = (i * STRETCH + STRETCH + WORD.len() - 1).min(text.len());
        *to = text[i * STRETCH..end].windows(WORD.len()).filter(|w| *w == WORD).count() as u32;
    }
}
