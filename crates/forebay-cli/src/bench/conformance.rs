//! `forebay bench conformance`: the device layer's suite as a result file, for hosts without a toolchain.

use forebay::Kind;
use forebay::hal::{conformance, discover};

use super::part::{self, Part};
use super::schema::Row;

/// A part for each kind of device.
pub fn parts() -> Result<Vec<Part>, String> {
    let kinds = part::kinds(&Kind::ALL, None)?;
    Ok(kinds.into_iter().map(|k| Part::of_rows(k.name(), move |rows| run(k, rows))).collect())
}

/// A row per check and device: 1 passed, 0 failed.
fn run(kind: Kind, rows: &mut Vec<Row>) -> Result<(), String> {
    for d in discover(&[kind]).0 {
        for o in conformance::run(&*d) {
            let passed = o.failure.is_none();
            if let Some(why) = &o.failure {
                eprintln!("{kind}: {}: {why}", o.check);
            }
            rows.push(Row {
                target: "1".into(),
                met: Some(passed),
                ..Row::new(format!("{kind}: {}", o.check), "passed", Some(f64::from(u8::from(passed))))
            });
        }
    }
    Ok(())
}
