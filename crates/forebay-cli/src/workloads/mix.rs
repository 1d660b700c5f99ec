//! All workloads on real input, at three sizes, for whoever wants to place them.

use bytemuck::Pod;
use forebay::{Datablock, Task, Template};

use super::{aes, dxt, grep, histogram, lbm, particles};

/// A picture, as a camera took it (data/README.md has its origin).
const PICTURE: &[u8] = include_bytes!("../../../../data/aloe/aloeL.jpg");
/// A text for whoever has none on the machine.
const TEXT: &str = include_str!("../../../../ARCHITECTURE.md");
/// Longer texts, if the machine has them.
const TEXTS: [&str; 2] = ["/usr/share/common-licenses/GPL-3", "/usr/share/common-licenses/GFDL-1.3"];

/// A workload at a size.
pub struct Work {
    /// Its name.
    pub name: &'static str,
    /// Makes the task.
    pub task: Box<dyn Fn() -> Task>,
    /// What comes in.
    pub inputs: Vec<Datablock>,
    /// How far implementations may be apart, as a part of the larger value.
    pub tolerance: f64,
    /// The same for schedulers that are not ours.
    pub plain: Plain,
}

/// Computes a workload on the core that calls: inputs, and what comes out.
type OnCore = Box<dyn Fn(&[&[u8]], &mut [u8]) + Send + Sync>;

/// A workload without anything of the dataflow engine.
pub struct Plain {
    /// Names of the ports: those of the inputs, then that of the output. An output with an input's name is that input,
    /// changed in place.
    pub ports: &'static [&'static str],
    /// Size of what comes out.
    pub bytes: usize,
    /// One call.
    pub on_core: OnCore,
}

impl Plain {
    fn new<I: Pod, O: Pod>(
        ports: &'static [&'static str],
        elements: usize,
        f: impl Fn(&[I], &mut [O]) + Send + Sync + 'static,
    ) -> Self {
        let on_core = move |i: &[&[u8]], o: &mut [u8]| f(bytemuck::cast_slice(i[0]), bytemuck::cast_slice_mut(o));
        Plain { ports, bytes: elements * size_of::<O>(), on_core: Box::new(on_core) }
    }

    /// Whether the output is one of the inputs.
    pub fn in_place(&self) -> bool {
        self.ports.split_last().is_some_and(|(last, others)| others.contains(last))
    }
}

/// Text of exactly `n` bytes.
fn text(n: usize) -> Vec<u8> {
    let mut all: Vec<u8> = TEXTS.iter().filter_map(|p| std::fs::read(p).ok()).flatten().collect();
    if all.is_empty() {
        all = TEXT.as_bytes().to_vec();
    }
    all.iter().copied().cycle().take(n).collect()
}

/// The picture as RGBA, repeated to `wide` × `high` pixels.
fn picture(wide: usize, high: usize) -> forebay::Result<Vec<u8>> {
    let wrong = |e: image::ImageError| forebay::Error::Size { what: "picture".into(), why: e.to_string() };
    let p = image::load_from_memory(PICTURE).map_err(wrong)?.to_rgba8();
    let (w, h) = (p.width() as usize, p.height() as usize);
    let row = |y: usize| (0..wide).map(move |x| (x % w, y % h));
    Ok((0..high).flat_map(row).flat_map(|(x, y)| p.get_pixel(x as u32, y as u32).0).collect())
}

/// What [`aes::anywhere`] is called with, for so many bytes of text.
pub fn encryption(key: &aes::Key, n: usize) -> forebay::Result<Vec<Datablock>> {
    let words = |data: &[u32]| Datablock::from_slice(Template::array::<u32>([data.len()]), data);
    let (schedule, tables) = aes::constants(key, aes::Way::Encrypt);
    let wide = |bytes: &[u8]| bytemuck::pod_collect_to_vec::<u8, u32>(bytes);
    Ok(vec![
        words(&wide(&text(n)))?,
        words(&wide(&key.tweaks(0, n / aes::SECTOR)))?,
        words(&schedule)?,
        words(&tables)?,
    ])
}

/// The workloads; `scale` is 1, 2 or 4: so many times the data.
pub fn all(scale: usize) -> forebay::Result<Vec<Work>> {
    let bytes = |data: &[u8]| Datablock::from_slice(Template::array::<u8>([data.len()]), data);
    let floats = |data: &[f32]| Datablock::from_slice(Template::array::<f32>([data.len()]), data);
    let mut out = Vec::new();
    let n = scale << 20;
    let (key, sectors) = (aes::Key::new(&std::array::from_fn(|i| (i * 37 + 11) as u8)), n / aes::SECTOR);
    let inputs = encryption(&key, n)?;
    let same = key.clone();
    let on_core = move |i: &[&[u8]], o: &mut [u8]| aes::sectors(&same, aes::Way::Encrypt, o, i[1]);
    let plain = Plain { ports: &["data", "tweaks", "key", "tables", "data"], bytes: n, on_core: Box::new(on_core) };
    out.push(Work { name: "aes", task: Box::new(move || aes::anywhere(&key, sectors)), inputs, tolerance: 0.0, plain });
    let mut add = |name, task: Box<dyn Fn() -> Task>, input: Datablock, tolerance, plain| {
        out.push(Work { name, task, inputs: vec![input], tolerance, plain });
    };
    let plain = Plain::new(&["data", "bins"], 256, histogram::count);
    add("histogram", Box::new(move || histogram::task(n)), bytes(&picture(256, n / 1024)?)?, 0.0, plain);
    let plain = Plain::new(&["text", "found"], n.div_ceil(grep::STRETCH), grep::find);
    add("grep", Box::new(move || grep::task(n)), bytes(&text(n))?, 0.0, plain);
    let (wide, high) = (128, 64 * scale);
    let plain = Plain::new(&["rgba", "blocks"], wide * high * 2, move |i, o| dxt::compress(i, o, wide));
    add("dxt", Box::new(move || dxt::task(wide, high)), bytes(&picture(wide * 4, high * 4)?)?, 0.0, plain);
    let (w, h) = (256, 128 * scale);
    let ripple = lbm::ripple(w, h);
    let plain = Plain::new(&["from", "to"], ripple.len(), move |i, o| lbm::step(i, o, w, h));
    add("lbm", Box::new(move || lbm::task(w, h)), floats(&ripple)?, 1e-4, plain);
    let side = [5, 6, 8][scale.ilog2().min(2) as usize];
    let strewn = particles::strewn(side);
    let plain = Plain::new(&["at", "force"], strewn.len(), move |i, o| particles::forces(i, o, side));
    add("particles", Box::new(move || particles::task(side)), floats(&strewn)?, 1e-3, plain);
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;
    use forebay::{Kind, Mode, Runtime};

    #[test]
    fn every_device_gives_the_same() {
        for kind in [Kind::OpenCl, Kind::Cuda] {
            let rt = match Runtime::builder().mode(Mode::FirstAvailable).service(false).only(kind) {
                Ok(rt) => rt.build().unwrap(),
                Err(e) => {
                    eprintln!("skipped: {e}");
                    continue;
                }
            };
            for w in all(1).unwrap() {
                let found = rt.verify(&w.task, &w.inputs).unwrap();
                assert!(!found.is_empty(), "{} on {kind}", w.name);
                for d in found {
                    assert!(d.largest <= w.tolerance, "{} on {kind}: {d:?}", w.name);
                }
            }
        }
    }

    #[test]
    fn a_gpu_would_give_the_same() {
        crate::stand_in::again_as_ptx(&["workloads::mix::tests::every_device_gives_the_same"], &[]);
    }

    #[test]
    fn what_they_compute_is_right() {
        let rt = Runtime::builder().cpu_only().build().unwrap();
        for w in all(1).unwrap() {
            let out = rt.accelerate(1, &w.task).unwrap().call(&w.inputs).unwrap();
            // Without the engine it is the same.
            let inputs: Vec<&[u8]> = w.inputs.iter().map(|b| b.as_bytes().unwrap()).collect();
            let mut plain = vec![0u32; w.plain.bytes / 4];
            let bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut plain);
            if w.plain.in_place() {
                bytes.copy_from_slice(inputs[0]);
            }
            (w.plain.on_core)(&inputs, bytes);
            assert!(*bytes == *out[0].as_bytes().unwrap(), "{}", w.name);
            match w.name {
                "aes" => {
                    use xts_mode::{Xts128, get_tweak_default};
                    let key: [u8; 64] = std::array::from_fn(|i| (i * 37 + 11) as u8);
                    let halves = key.split_at(32);
                    let cipher = |k: &[u8]| <::aes::Aes256 as ::aes::cipher::KeyInit>::new_from_slice(k).unwrap();
                    let mut wanted: Vec<u8> = bytemuck::cast_slice(w.inputs[0].as_slice::<u32>().unwrap()).to_vec();
                    Xts128::new(cipher(halves.0), cipher(halves.1)).encrypt_area(
                        &mut wanted,
                        aes::SECTOR,
                        0,
                        get_tweak_default,
                    );
                    assert!(bytemuck::cast_slice::<u32, u8>(out[0].as_slice().unwrap()) == wanted);
                }
                "histogram" => {
                    let sum: u32 = out[0].as_slice::<u32>().unwrap().iter().sum();
                    assert_eq!(sum, 1 << 20);
                }
                "grep" => {
                    let text = w.inputs[0].as_slice::<u8>().unwrap();
                    let wanted = text.windows(4).filter(|w| *w == grep::WORD).count() as u32;
                    assert!(wanted > 100);
                    assert_eq!(out[0].as_slice::<u32>().unwrap().iter().sum::<u32>(), wanted);
                }
                "lbm" => {
                    // Mass stays.
                    let mass = |b: &Datablock| b.as_slice::<f32>().unwrap().iter().map(|v| f64::from(*v)).sum::<f64>();
                    assert!((mass(&out[0]) / mass(&w.inputs[0]) - 1.0).abs() < 1e-5);
                }
                "dxt" => {
                    // Pixels come back near where they were: no farther than the box is wide.
                    let (rgba, blocks) = (w.inputs[0].as_slice::<u8>().unwrap(), out[0].as_slice::<u32>().unwrap());
                    let green = (blocks[0] >> 5 & 63) << 2;
                    let most = (0..16).map(|p| rgba[((p / 4) * 512 + p % 4) * 4 + 1]).max().unwrap();
                    assert_eq!(green, u32::from(most) >> 2 << 2);
                }
                _ => {
                    // By where particles are, and not by how they are stored: all whose box is no more than one away.
                    let at: &[[f32; 4]] = bytemuck::cast_slice(w.inputs[0].as_slice::<f32>().unwrap());
                    let force: &[[f32; 4]] = bytemuck::cast_slice(out[0].as_slice::<f32>().unwrap());
                    for i in (0..at.len()).step_by(97) {
                        let near = |o: &&[f32; 4]| (0..3).all(|k| (o[k].floor() - at[i][k].floor()).abs() <= 1.0);
                        let mut sum = [0f64; 4];
                        for o in at.iter().filter(near) {
                            let r = [0, 1, 2].map(|k| f64::from(at[i][k]) - f64::from(o[k]));
                            let part = f64::from(o[3]) / (0.25 + r.iter().map(|x| x * x).sum::<f64>());
                            (0..3).for_each(|k| sum[k] += part * part * r[k]);
                            sum[3] += part;
                        }
                        for k in 0..4 {
                            let got = f64::from(force[i][k]);
                            assert!(
                                (got - sum[k]).abs() <= 1e-3 + 1e-3 * sum[k].abs(),
                                "{i} {k}: {got}, not {}",
                                sum[k]
                            );
                        }
                    }
                }
            }
        }
    }
}
