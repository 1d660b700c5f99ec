//! The demo's ends that need drivers of the kernel: keys through uinput, and V4L2 cameras, for which the kernel's own test
//! driver (vivid) stands. Where these are not (`modprobe uinput`, `modprobe vivid n_devs=2`), the tests say so and are skipped.

use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use evdev::{Device, EventSummary};

fn demo(args: &[&str]) -> Child {
    let common = ["demo", "gesture", "--device", "cpu", "--json"];
    let mut command = Command::new(env!("CARGO_BIN_EXE_forebay"));
    command.args(common).args(args).stdout(Stdio::piped()).stderr(Stdio::piped());
    command.spawn().unwrap()
}

fn result(demo: Child) -> serde_json::Value {
    let o = demo.wait_with_output().unwrap();
    assert!(o.status.success(), "{}", String::from_utf8_lossy(&o.stderr));
    serde_json::from_slice(&o.stdout).unwrap()
}

#[test]
fn every_gesture_is_a_key_that_is_pressed_and_released() {
    if let Err(e) = std::fs::OpenOptions::new().write(true).open("/dev/uinput") {
        eprintln!("skipped: /dev/uinput: {e}");
        return;
    }
    // Slowly, so that the keyboard has been found before the first gesture.
    let mut running = demo(&["--frames", "24", "--rate", "8", "--uinput"]);
    let (mut keyboard, mut keys) = (None, [0u64; 2]);
    let mut ended = false;
    while !ended {
        // Whatever came before the end is read after it has been seen.
        ended = running.try_wait().unwrap().is_some();
        if keyboard.is_none() {
            keyboard = evdev::enumerate().map(|(_, d)| d).find(|d| d.name() == Some("Forebay gestures"));
            if let Some(k) = &keyboard {
                k.set_nonblocking(true).unwrap();
            }
        }
        // A keyboard that has gone is an error, and so is nothing to read.
        if let Some(events) = keyboard.as_mut().and_then(|k: &mut Device| k.fetch_events().ok()) {
            for e in events {
                if let EventSummary::Key(_, _, pressed) = e.destructure() {
                    keys[pressed as usize] += 1;
                }
            }
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    let gestures = result(running)["gestures"].as_u64().unwrap();
    assert!(keyboard.is_some() && gestures > 0);
    assert_eq!(keys, [gestures, gestures]);
}

/// Nodes of the kernel's test driver: somebody's own cameras stay off.
fn cameras() -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir("/sys/class/video4linux").into_iter().flatten().flatten() {
        let name = std::fs::read_to_string(entry.path().join("name")).unwrap_or_default();
        if name.starts_with("vivid") && name.contains("vid-cap") {
            found.push(PathBuf::from("/dev").join(entry.file_name()));
        }
    }
    found.sort();
    found
}

#[test]
fn two_cameras_give_the_demo_its_frames() {
    let cameras = cameras();
    let [left, right, ..] = cameras.as_slice() else {
        eprintln!("skipped: two cameras of the kernel's test driver are not here");
        return;
    };
    let (left, right) = (left.display().to_string(), right.display().to_string());
    let v = result(demo(&["--frames", "12", "--camera", &left, &right]));
    assert_eq!((v["frames"].as_u64(), v["tasks"]["hidinput"]["cpu"].as_u64()), (Some(12), Some(14)), "{v}");
    // The same one twice: a camera has one user at a time.
    let o = demo(&["--frames", "2", "--camera", &left, &left]).wait_with_output().unwrap();
    let e = String::from_utf8_lossy(&o.stderr);
    assert!(!o.status.success() && e.contains(&left) && !e.contains("panicked"), "{e}");
}
