//! The recording: calibrated stereo pairs, replayed forwards and backwards so that motion stays continuous.

use serde::Deserialize;

macro_rules! pairs {
    ($($n:literal),*) => {
        &[$((
            include_bytes!(concat!("../../../../../data/stereo/left", $n, ".jpg")).as_slice(),
            include_bytes!(concat!("../../../../../data/stereo/right", $n, ".jpg")).as_slice(),
        )),*]
    };
}

/// The pairs of data/stereo, compiled in: origin and licence in data/README.md.
const PAIRS: &[(&[u8], &[u8])] = pairs!("01", "02", "03", "04", "05", "06", "07", "08", "09", "11", "12", "13", "14");

const CALIBRATION: &str = include_str!("../../../../../data/stereo/calibration.toml");

/// A grey image, rows without gaps.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Grey {
    /// Pixels from the left.
    pub width: usize,
    /// Pixels from the top.
    pub height: usize,
    /// Brightness.
    pub pixels: Vec<u8>,
}

/// Decodes a JPEG or PNG file to grey.
pub fn decode(bytes: &[u8]) -> Result<Grey, String> {
    let image = image::load_from_memory(bytes).map_err(|e| e.to_string())?.into_luma8();
    Ok(Grey { width: image.width() as usize, height: image.height() as usize, pixels: image.into_raw() })
}

/// The stereo pairs in order.
pub fn pairs() -> Result<Vec<(Grey, Grey)>, String> {
    PAIRS.iter().map(|(l, r)| Ok((decode(l)?, decode(r)?))).collect()
}

/// Number of the pair at position `i` of an endless replay: to the end, back to the start, and so on.
pub fn replay(i: u64, pairs: usize) -> usize {
    let period = (2 * pairs).saturating_sub(2).max(1) as u64;
    let at = (i % period) as usize;
    if at < pairs { at } else { 2 * pairs - 2 - at }
}

/// One camera of a calibrated pair; matrices are row-major.
#[derive(Clone, Debug, Deserialize)]
pub struct Camera {
    /// 3×3 camera matrix, pixels.
    pub camera: [f64; 9],
    /// k1 k2 p1 p2 k3.
    pub distortion: [f64; 5],
    /// 3×3 rotation from the camera's frame into the rectified one.
    pub rotation: [f64; 9],
    /// 3×4 projection of the rectified frame, pixels.
    pub projection: [f64; 12],
}

/// Calibration of a pair.
#[derive(Clone, Debug, Deserialize)]
pub struct Calibration {
    /// Width and height of the images it is for.
    pub size: [usize; 2],
    /// Distance of the cameras, in squares of the chessboard.
    pub baseline: f64,
    /// Left camera.
    pub left: Camera,
    /// Right camera.
    pub right: Camera,
}

impl Calibration {
    /// The recording's own.
    pub fn of_recording() -> Result<Self, String> {
        Self::parse(CALIBRATION)
    }

    /// From a file's text.
    ///
    /// # Errors
    /// What is missing or wrong, with its line; sizes that no camera has; optics without a focal length.
    pub fn parse(text: &str) -> Result<Self, String> {
        let c: Calibration = toml::from_str(text).map_err(|e| e.to_string())?;
        let [w, h] = c.size;
        if !(16..=8192).contains(&w) || !(16..=8192).contains(&h) || w % 2 + h % 2 != 0 {
            return Err(format!("size {w}×{h}: even numbers from 16 to 8192 are wanted"));
        }
        let cameras = [&c.left, &c.right];
        let positive = |v: f64| v.is_finite() && v > 0.0;
        if !cameras.iter().all(|k| positive(k.projection[0]) && positive(k.projection[5])) || !positive(c.baseline) {
            return Err("the projections' focal lengths and the baseline must be above 0".into());
        }
        Ok(c)
    }

    /// A pair that is rectified already.
    #[cfg(test)]
    pub fn rectified(width: usize, height: usize, focal: f64, baseline: f64) -> Self {
        let (cx, cy) = (width as f64 / 2.0, height as f64 / 2.0);
        let eye = [1.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 1.0];
        let camera = Camera {
            camera: [focal, 0.0, cx, 0.0, focal, cy, 0.0, 0.0, 1.0],
            distortion: [0.0; 5],
            rotation: eye,
            projection: [focal, 0.0, cx, 0.0, 0.0, focal, cy, 0.0, 0.0, 0.0, 1.0, 0.0],
        };
        Calibration { size: [width, height], baseline, left: camera.clone(), right: camera }
    }

    /// Where each rectified pixel of both views comes from, in 1/32 pixel, x and y interleaved, left view first; the
    /// rectified images are smaller by `scale`.
    pub fn maps(&self, scale: usize) -> Vec<i16> {
        let (w, h) = (self.size[0] / scale, self.size[1] / scale);
        let mut out = Vec::with_capacity(4 * w * h);
        for c in [&self.left, &self.right] {
            for v in 0..h {
                for u in 0..w {
                    let (x, y) = c.source(full(u, scale), full(v, scale));
                    let fixed = |v: f64| (v * 32.0).round().clamp(-32768.0, 32767.0) as i16;
                    out.extend([fixed(x), fixed(y)]);
                }
            }
        }
        out
    }
}

/// Middle of a pixel of the smaller image, in pixels of the full one.
fn full(u: usize, scale: usize) -> f64 {
    u as f64 * scale as f64 + (scale as f64 - 1.0) / 2.0
}

impl Camera {
    /// The source position of a rectified pixel (Brown's distortion model, as OpenCV's).
    fn source(&self, u: f64, v: f64) -> (f64, f64) {
        let p = &self.projection;
        let ray = [(u - p[2]) / p[0], (v - p[6]) / p[5], 1.0];
        // The rotation's inverse is its transpose.
        let turn = |i: usize| (0..3).map(|k| self.rotation[3 * k + i] * ray[k]).sum::<f64>();
        let (x, y) = (turn(0) / turn(2), turn(1) / turn(2));
        let [k1, k2, p1, p2, k3] = self.distortion;
        let r2 = x * x + y * y;
        let radial = 1.0 + r2 * (k1 + r2 * (k2 + r2 * k3));
        let dx = x * radial + 2.0 * p1 * x * y + p2 * (r2 + 2.0 * x * x);
        let dy = y * radial + p1 * (r2 + 2.0 * y * y) + 2.0 * p2 * x * y;
        (self.camera[0] * dx + self.camera[2], self.camera[4] * dy + self.camera[5])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_calibration_that_makes_no_sense_is_refused() {
        assert!(Calibration::parse(CALIBRATION).is_ok());
        for (from, to, word) in [
            ("size = [640, 480]", "size = [640, 0]", "640×0"),
            ("baseline = 3.338730", "baseline = -1.0", "baseline"),
            ("projection = [519.1306549918266", "projection = [0.0", "focal"),
            ("[right]", "[wrong]", "right"),
        ] {
            assert!(CALIBRATION.contains(from));
            let e = Calibration::parse(&CALIBRATION.replace(from, to)).unwrap_err();
            assert!(e.contains(word), "{e}");
        }
    }

    #[test]
    fn the_replay_goes_back_and_forth() {
        let order: Vec<usize> = (0..9).map(|i| replay(i, 4)).collect();
        assert_eq!(order, [0, 1, 2, 3, 2, 1, 0, 1, 2]);
    }

    #[test]
    fn all_pairs_decode_to_the_calibrated_size() {
        let size = Calibration::of_recording().unwrap().size;
        for (l, r) in pairs().unwrap() {
            assert_eq!([l.width, l.height], size);
            assert_eq!([r.width, r.height], size);
        }
    }
}
