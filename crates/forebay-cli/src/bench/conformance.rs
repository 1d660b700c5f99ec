//! `forebay bench conformance`: the device layer's suite as a result file, for hosts without a toolchain.

use forebay::Kind;
use forebay::hal::{conformance, discover};

use super::schema::Row;

/// A row per check and device: 1 passed, 0 failed.
pub fn run() -> Vec<Row> {
    let (devices, missing) = discover(&Kind::ALL);
    for (kind, why) in missing {
        eprintln!("{kind}: {why}");
    }
    let mut rows = Vec::new();
    for d in devices {
        for o in conformance::run(&*d) {
            let passed = o.failure.is_none();
            if let Some(why) = &o.failure {
                eprintln!("{}: {}: {why}", d.info().kind, o.check);
            }
            rows.push(Row {
                target: "1".into(),
                met: Some(passed),
                ..Row::new(format!("{}: {}", d.info().kind, o.check), "passed", Some(f64::from(u8::from(passed))))
            });
        }
    }
    rows
}
