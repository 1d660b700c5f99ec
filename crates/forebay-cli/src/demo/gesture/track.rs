//! From point clouds to gestures: the nearest object is followed from frame to frame.
//!
//! The object is what lies nearer than 1.3 times the depth that one point in ten falls short of (in the left view). Its
//! centroid's motion since the last frame makes a swipe (sideways or up and down), a push or pull (in depth), or,
//! when it rests for two frames, a point at its place.

/// A gesture.
#[derive(Clone, Copy, Debug, Default, PartialEq, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub struct Event {
    /// Number of the frame, from 0.
    pub frame: u32,
    /// Index into [`NAMES`].
    pub kind: u32,
    /// Centroid of the object, chessboard squares, in the left camera's frame.
    pub at: [f32; 3],
    /// Its motion since the last frame, squares.
    pub by: [f32; 3],
}

/// Names of the kinds.
pub const NAMES: [&str; 7] = ["swipe-left", "swipe-right", "swipe-up", "swipe-down", "push", "pull", "point"];
/// Most gestures of a frame.
pub const MAX_EVENTS: usize = 4;

/// Motion per frame, in squares, that counts.
const MOVES: f32 = 0.7;
/// Motion below which the object rests.
const RESTS: f32 = 0.25;
/// Points that an object has at least, of ten thousand.
const LEAST: usize = 100;

/// Follows an object.
pub struct Tracker {
    points: usize,
    frame: u32,
    last: Option<[f32; 3]>,
    resting: u32,
    depths: Vec<f32>,
}

impl Tracker {
    /// For clouds of `w` × `h` points a view.
    pub fn new(w: usize, h: usize) -> Self {
        Tracker { points: w * h, frame: 0, last: None, resting: 0, depths: Vec::with_capacity(w * h) }
    }

    /// The gestures of the next frame.
    pub fn look(&mut self, cloud: &[f32]) -> Vec<Event> {
        let frame = self.frame;
        self.frame += 1;
        let view = &cloud[..(4 * self.points).min(cloud.len())];
        self.depths.clear();
        self.depths.extend(view.chunks_exact(4).map(|p| p[2]).filter(|z| *z > 0.0));
        if self.depths.len() * 10_000 < self.points * LEAST {
            self.last = None;
            return Vec::new();
        }
        let tenth = self.depths.len() / 10;
        let near = *self.depths.select_nth_unstable_by(tenth, f32::total_cmp).1 * 1.3;
        let (mut sum, mut n) = ([0f64; 3], 0u32);
        for p in view.chunks_exact(4).filter(|p| p[2] > 0.0 && p[2] < near) {
            sum.iter_mut().zip(p).for_each(|(s, v)| *s += f64::from(*v));
            n += 1;
        }
        let at = sum.map(|s| (s / f64::from(n.max(1))) as f32);
        let Some(last) = self.last.replace(at) else { return Vec::new() };
        let by = [at[0] - last[0], at[1] - last[1], at[2] - last[2]];
        let mut kinds = Vec::new();
        if by[0].abs() >= MOVES.max(by[1].abs()) {
            kinds.push(u32::from(by[0] > 0.0));
        } else if by[1].abs() >= MOVES {
            kinds.push(2 + u32::from(by[1] > 0.0));
        }
        if by[2].abs() >= 2.0 * MOVES {
            kinds.push(4 + u32::from(by[2] > 0.0));
        }
        let rests = by.iter().all(|v| v.abs() < RESTS);
        self.resting = if rests { self.resting + 1 } else { 0 };
        if self.resting == 2 {
            kinds.push(6);
        }
        kinds.into_iter().map(|kind| Event { frame, kind, at, by }).collect()
    }
}

impl Event {
    /// As a line of JSON.
    pub fn json(&self) -> String {
        let name = NAMES.get(self.kind as usize).unwrap_or(&"?");
        let v = |a: [f32; 3]| format!("[{:.3},{:.3},{:.3}]", a[0], a[1], a[2]);
        format!("{{\"frame\":{},\"event\":\"{name}\",\"at\":{},\"by\":{}}}", self.frame, v(self.at), v(self.by))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A cloud with a square object at (x, y, z) before a wall at 50.
    fn scene(x: f32, y: f32, z: f32) -> Vec<f32> {
        let mut cloud = Vec::new();
        for j in 0..40 {
            for i in 0..40 {
                let (px, py) = (i as f32 - 20.0, j as f32 - 20.0);
                let inside = (px - x).abs() < 8.0 && (py - y).abs() < 8.0;
                cloud.extend([px, py, if inside { z } else { 50.0 }, 0.5]);
            }
        }
        cloud
    }

    #[test]
    fn motion_in_each_direction_has_its_name() {
        let cases = [
            ((-3.0, 0.0, 0.0), "swipe-left"),
            ((3.0, 0.0, 0.0), "swipe-right"),
            ((0.0, -3.0, 0.0), "swipe-up"),
            ((0.0, 3.0, 0.0), "swipe-down"),
            ((0.0, 0.0, -3.0), "push"),
            ((0.0, 0.0, 3.0), "pull"),
        ];
        for ((dx, dy, dz), name) in cases {
            let mut t = Tracker::new(40, 40);
            assert!(t.look(&scene(0.0, 0.0, 15.0)).is_empty());
            let e = t.look(&scene(dx, dy, 15.0 + dz));
            assert_eq!(e.iter().map(|e| NAMES[e.kind as usize]).collect::<Vec<_>>(), [name]);
        }
    }

    #[test]
    fn a_resting_object_points_once_and_an_empty_scene_is_silent() {
        let mut t = Tracker::new(40, 40);
        let names: Vec<_> =
            (0..6).flat_map(|_| t.look(&scene(1.0, 2.0, 12.0))).map(|e| NAMES[e.kind as usize]).collect();
        assert_eq!(names, ["point"]);
        assert!(t.look(&vec![0.0; 4 * 1600]).is_empty());
    }
}
