//! Programs that share a device, and a service of their own: what `demo sharing` and `bench sharing` are made of.
//!
//! The programs are real processes ([`program`], [`file`], and [`plain`], which knows nothing of Forebay); a [`Stage`] starts and
//! stops them, with a service or without.

pub mod file;
pub mod plain;
pub mod program;
pub mod progress;
mod stage;

pub use stage::{Actor, Sample, Stage, plain_rounds};

/// The value below which a part `q` of all is; 0 for none.
pub fn quantile(values: &[f64], q: f64) -> f64 {
    let mut v = values.to_vec();
    v.sort_by(f64::total_cmp);
    if v.is_empty() { 0.0 } else { v[((v.len() - 1) as f64 * q).round() as usize] }
}
