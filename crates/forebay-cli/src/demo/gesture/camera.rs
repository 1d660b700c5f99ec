//! Where frames come from: the recording, or one or two V4L2 cameras.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use linuxvideo::format::{PixFormat, PixelFormat};
use linuxvideo::stream::ReadStream;
use linuxvideo::{BufType, Device};

use super::recording::{self, Grey};

/// Eight bits of brightness.
const GREY: PixelFormat = PixelFormat::from_fourcc(*b"GREY");
/// Formats that are understood, the cheapest to turn into grey first.
const FORMATS: [PixelFormat; 3] = [GREY, PixelFormat::YUYV, PixelFormat::MJPG];

/// A source of stereo frames.
pub enum Source<'a> {
    /// A recording, back and forth, at this rate or as fast as possible.
    Recording {
        /// Its pairs.
        frames: &'a [(Grey, Grey)],
        /// Frames a second.
        rate: Option<f64>,
    },
    /// One camera that gives both views side by side, or two; they set the rate.
    Live(Vec<Camera>),
}

/// Both images of a frame.
pub struct Frame {
    pub left: Vec<u8>,
    pub right: Vec<u8>,
}

impl Source<'_> {
    /// Frame `i` of a run that began at `begun`; waits until it is due.
    ///
    /// # Errors
    /// A camera that gives no frame.
    pub fn frame(&mut self, i: u64, begun: Instant, into: &mut Frame) -> Result<(), String> {
        match self {
            Source::Recording { frames, rate } => {
                if let Some(rate) = rate {
                    let due = begun + Duration::from_secs_f64(i as f64 / *rate);
                    std::thread::sleep(due.saturating_duration_since(Instant::now()));
                }
                // Two frames have warmed up.
                let (l, r) = &frames[recording::replay(i + 2, frames.len())];
                into.left.clone_from(&l.pixels);
                into.right.clone_from(&r.pixels);
                Ok(())
            }
            Source::Live(cameras) => match cameras.as_mut_slice() {
                [both] => {
                    let image = both.grey()?;
                    let half = image.width / 2;
                    let side = |from: usize| {
                        image.pixels.chunks_exact(image.width).flat_map(move |row| &row[from..from + half]).copied()
                    };
                    into.left = side(0).collect();
                    into.right = side(half).collect();
                    Ok(())
                }
                [left, right, ..] => {
                    into.left = left.grey()?.pixels;
                    into.right = right.grey()?.pixels;
                    Ok(())
                }
                [] => Err("no camera".into()),
            },
        }
    }
}

/// A V4L2 camera that streams.
pub struct Camera {
    stream: ReadStream,
    path: PathBuf,
    format: PixelFormat,
    width: usize,
    height: usize,
    /// Bytes from one row to the next, for uncompressed formats.
    stride: usize,
}

/// Opens cameras for views of `size`: one with both side by side, or a left and a right one.
///
/// # Errors
/// A device that cannot be opened, is no camera, or has neither the size nor a format that is understood.
pub fn open(paths: &[PathBuf], size: (usize, usize)) -> Result<Vec<Camera>, String> {
    match paths {
        [both] => Ok(vec![Camera::open(both, (2 * size.0, size.1))?]),
        [left, right] => Ok(vec![Camera::open(left, size)?, Camera::open(right, size)?]),
        _ => Err("--camera takes one camera with both views side by side, or a left and a right one".into()),
    }
}

impl Camera {
    fn open(path: &Path, (width, height): (usize, usize)) -> Result<Self, String> {
        let failed = |e: std::io::Error| format!("{}: {e}", path.display());
        let device = Device::open(path).map_err(failed)?;
        let offered = device.formats(BufType::VIDEO_CAPTURE).map(|f| f.map(|f| f.pixel_format()));
        let unlike = |e: std::io::Error| match e.raw_os_error().map(rustix::io::Errno::from_raw_os_error) {
            Some(rustix::io::Errno::NOTTY) => format!("{}: it is no camera (V4L2)", path.display()),
            _ => failed(e),
        };
        let offered = offered.collect::<std::io::Result<Vec<_>>>().map_err(unlike)?;
        let wanted = FORMATS.into_iter().find(|f| offered.contains(f)).ok_or_else(|| {
            let names: Vec<String> = offered.iter().map(ToString::to_string).collect();
            format!("{}: no format of GREY, YUYV, MJPG; it has: {}", path.display(), names.join(", "))
        })?;
        let capture = device.video_capture(PixFormat::new(width as u32, height as u32, wanted)).map_err(failed)?;
        let got = capture.format();
        let is = (got.width() as usize, got.height() as usize);
        if is != (width, height) || got.pixel_format() != wanted {
            let (w, h) = is;
            return Err(format!(
                "{}: the camera gives {w}×{h} {}, the calibration is for {width}×{height}; see --calibration",
                path.display(),
                got.pixel_format()
            ));
        }
        let stride = got.bytes_per_line() as usize;
        let stream = capture.into_stream().map_err(failed)?;
        Ok(Camera { stream, path: path.to_owned(), format: wanted, width, height, stride })
    }

    /// The next frame; waits for it.
    fn grey(&mut self) -> Result<Grey, String> {
        let (format, width, height, stride) = (self.format, self.width, self.height, self.stride);
        let image = self.stream.dequeue(|frame| Ok(to_grey(format, &frame, width, height, stride)));
        image
            .map_err(|e| e.to_string())
            .and_then(|converted| converted)
            .map_err(|why| format!("{}: {why}", self.path.display()))
    }
}

/// A camera's bytes as a grey image.
fn to_grey(format: PixelFormat, bytes: &[u8], width: usize, height: usize, stride: usize) -> Result<Grey, String> {
    // Bytes from one pixel's brightness to the next.
    let step = match format {
        GREY => 1,
        PixelFormat::YUYV => 2,
        _ => {
            let image = recording::decode(bytes)?;
            if (image.width, image.height) != (width, height) {
                return Err(format!("a frame of {}×{} instead of {width}×{height}", image.width, image.height));
            }
            return Ok(image);
        }
    };
    let stride = stride.max(step * width);
    let needed = (height.max(1) - 1) * stride + step * width;
    if bytes.len() < needed {
        return Err(format!("a frame of {} bytes instead of {needed}", bytes.len()));
    }
    let rows = (0..height).map(|y| &bytes[y * stride..y * stride + step * width]);
    Ok(Grey { width, height, pixels: rows.flat_map(|row| row.iter().step_by(step)).copied().collect() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_format_becomes_grey_and_short_frames_are_refused() {
        // Three by two, rows of eight bytes.
        let grey = [1, 2, 3, 0, 0, 0, 0, 0, 4, 5, 6];
        let want = Grey { width: 3, height: 2, pixels: vec![1, 2, 3, 4, 5, 6] };
        assert_eq!(to_grey(GREY, &grey, 3, 2, 8).unwrap(), want);
        let yuyv = [1, 128, 2, 128, 3, 128, 0, 0, 4, 128, 5, 128, 6, 128];
        assert_eq!(to_grey(PixelFormat::YUYV, &yuyv, 3, 2, 8).unwrap(), want);
        assert!(to_grey(PixelFormat::YUYV, &yuyv[..13], 3, 2, 8).unwrap_err().contains("13 bytes instead of 14"));
        assert!(to_grey(PixelFormat::YUYV, &[], 3, 2, 0).is_err());
        assert!(to_grey(PixelFormat::MJPG, b"no jpeg", 3, 2, 0).is_err());
        let jpeg = include_bytes!("../../../../../data/stereo/left01.jpg");
        let want = recording::decode(jpeg).unwrap();
        assert_eq!(to_grey(PixelFormat::MJPG, jpeg, want.width, want.height, 0).unwrap(), want);
        assert!(to_grey(PixelFormat::MJPG, jpeg, 1, 1, 0).unwrap_err().contains("640×480 instead of 1×1"));
    }

    #[test]
    fn what_is_no_camera_is_refused_by_name() {
        let e = open(&["/dev/video-none".into()], (640, 480)).err().unwrap();
        assert!(e.contains("/dev/video-none"), "{e}");
        let e = open(&["/dev/null".into(), "/dev/null".into()], (640, 480)).err().unwrap();
        assert!(e.contains("/dev/null"), "{e}");
        assert!(open(&[], (640, 480)).err().unwrap().contains("--camera"));
    }
}
