//! The pipeline on real images: the same result on every device, and the right one.

use forebay::{Datablock, Graph, Kind, Runtime, Template};

use super::pipeline::{self, Shape};
use super::recording::{self, Calibration, Grey};

/// Runs `xform` and `filter` on one pair on a kind of device: disparities, cloud, filtered cloud; none without such a device.
fn stages(kind: Kind, shape: &Shape, l: &Grey, r: &Grey) -> Option<(Vec<i32>, Vec<f32>, Vec<f32>)> {
    let rt = match Runtime::builder().only(kind) {
        Ok(b) => b.build().unwrap(),
        Err(e) => {
            eprintln!("skipped: {e}");
            return None;
        }
    };
    let mut g = Graph::new("stages");
    let x = g.add(pipeline::xform(shape).only(kind)).unwrap();
    let f = g.add(pipeline::filter(shape).only(kind)).unwrap();
    g.connect((x, "cloud"), (f, "cloud")).unwrap();
    let feeds = [(x, "left"), (x, "right"), (x, "map"), (f, "weights")].map(|p| g.feed(p, 1).unwrap());
    let drains = [(x, "disp"), (x, "cloud"), (f, "smooth")].map(|p| g.drain(p, 1).unwrap());
    let run = rt.start(g).unwrap();
    let weights = pipeline::weights();
    let blocks = [
        Datablock::from_slice(shape.image(), &l.pixels).unwrap(),
        Datablock::from_slice(shape.image(), &r.pixels).unwrap(),
        Datablock::from_slice(shape.map(), &shape.calibration.maps(shape.scale)).unwrap(),
        Datablock::from_slice(Template::array::<f32>([weights.len()]), &weights).unwrap(),
    ];
    for (feed, block) in feeds.into_iter().zip(blocks) {
        run.push(feed, block).unwrap();
    }
    let [d, c, s] = drains.map(|d| run.pull(d).unwrap());
    Some((d.as_slice().unwrap().to_vec(), c.as_slice().unwrap().to_vec(), s.as_slice().unwrap().to_vec()))
}

/// Largest relative difference of two clouds' numbers (absolute below 1).
fn difference(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(a, b)| (a - b).abs() / a.abs().max(1.0)).fold(0.0, f32::max)
}

/// Tolerances across devices: disparities are integers and equal; reprojection divides (OpenCL allows 2.5 ulp), and the
/// filter's depth bins may fall to the other side of an edge, one step of its weights.
const CLOUD_TOLERANCE: f32 = 1e-5;
const FILTER_TOLERANCE: f32 = 1e-3;

#[test]
fn every_device_makes_the_same_cloud_of_a_real_frame() {
    let shape = Shape::of_recording().unwrap();
    let frames = recording::pairs().unwrap();
    for i in [0, 4] {
        let (l, r) = &frames[i];
        let (disp, cloud, smooth) = stages(Kind::Cpu, &shape, l, r).unwrap();
        let valid = cloud.chunks_exact(4).filter(|p| p[2] > 0.0).count();
        assert!(valid * 5 > cloud.len() / 4, "only {valid} points in frame {i}");
        for kind in [Kind::OpenCl, Kind::Cuda] {
            let Some((d, c, s)) = stages(kind, &shape, l, r) else { continue };
            assert_eq!(disp, d, "disparities on {kind}");
            assert!(difference(&cloud, &c) <= CLOUD_TOLERANCE, "{kind}: {}", difference(&cloud, &c));
            assert!(difference(&smooth, &s) <= FILTER_TOLERANCE, "{kind}: {}", difference(&smooth, &s));
        }
    }
}

#[test]
fn the_filter_takes_noise_away_and_keeps_the_scene() {
    let shape = Shape::of_recording().unwrap();
    let (l, r) = &recording::pairs().unwrap()[0];
    let (_, cloud, smooth) = stages(Kind::Cpu, &shape, l, r).unwrap();
    // Roughness: mean difference of horizontally adjacent valid depths that belong to one surface.
    let rough = |c: &[f32]| {
        let z: Vec<f32> = c.chunks_exact(4).map(|p| p[2]).collect();
        let d: Vec<f32> = z
            .windows(2)
            .filter(|w| w[0] > 0.0 && w[1] > 0.0)
            .map(|w| (w[0] - w[1]).abs())
            .filter(|d| *d < 1.0)
            .collect();
        d.iter().sum::<f32>() / d.len() as f32
    };
    let (before, after) = (rough(&cloud), rough(&smooth));
    // Measured: 0.116 → 0.086.
    assert!(after < 0.8 * before, "roughness {before} → {after}");
    let mean = |c: &[f32]| {
        let z: Vec<f32> = c.chunks_exact(4).map(|p| p[2]).filter(|z| *z > 0.0).collect();
        z.iter().sum::<f32>() / z.len() as f32
    };
    assert!((mean(&cloud) - mean(&smooth)).abs() < 0.02 * mean(&cloud));
}

#[test]
fn the_chessboard_lies_where_the_calibration_says() {
    // Ten squares of the board are 156 pixels wide in the first rectified half-size image (counted by eye), so one is
    // 15.6; with a focal length of 259.6 pixels the board is 259.6 / 15.6 ≈ 16.6 squares away. It is held at an angle.
    let shape = Shape::of_recording().unwrap();
    let (l, r) = &recording::pairs().unwrap()[0];
    let (_, _, smooth) = stages(Kind::Cpu, &shape, l, r).unwrap();
    let (w, _) = shape.rectified();
    let mut board: Vec<f32> = (40..140)
        .flat_map(|y| (120..260).map(move |x| 4 * (y * w + x) + 2))
        .map(|i| smooth[i])
        .filter(|z| *z > 0.0)
        .collect();
    board.sort_by(f32::total_cmp);
    let depth = board[board.len() / 2];
    assert!((15.0..18.0).contains(&depth), "the board is at {depth} squares");
}

#[test]
fn disparities_of_the_aloe_pair_match_the_ground_truth() {
    let file = |n: &str| {
        let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../data/aloe").join(n);
        recording::decode(&std::fs::read(path).unwrap()).unwrap()
    };
    let (l, r, truth) = (file("aloeL.jpg"), file("aloeR.jpg"), file("aloeGT.png"));
    let calibration = Calibration::rectified(l.width, l.height, 1000.0, 1.0);
    let scale = 2;
    let shape = Shape { calibration, scale, disparities: 140, radius: 4 };
    let (disp, cloud, _) = stages(Kind::Cpu, &shape, &l, &r).unwrap();
    let (w, h) = shape.rectified();
    let (mut compared, mut bad, mut sum) = (0u32, 0u32, 0.0);
    for y in 0..h {
        for x in 0..w {
            // The views must agree there (the cloud has a point), and the truth must be known.
            let t = f32::from(truth.pixels[(y * scale) * truth.width + x * scale]);
            if t == 0.0 || cloud[4 * (y * w + x) + 2] == 0.0 {
                continue;
            }
            let off = (disp[y * w + x] as f32 / 16.0 * scale as f32 - t).abs();
            compared += 1;
            bad += u32::from(off > 4.0);
            sum += off.min(4.0);
        }
    }
    let (share, mean) = (bad as f32 / compared as f32, sum / compared as f32);
    eprintln!(
        "aloe: {compared} of {} points compared, {:.2} % off by more than 4 px, mean {mean:.2} px",
        w * h,
        100.0 * share
    );
    assert!(compared as usize * 2 > w * h);
    // Measured: 9.7 % and 0.87 px. Windows of 9×9 blur depth edges, of which this scene has many.
    assert!(share < 0.12, "{:.2} % are off by more than 4 of 280 px", 100.0 * share);
    assert!(mean < 1.0, "mean error {mean} px");
}
