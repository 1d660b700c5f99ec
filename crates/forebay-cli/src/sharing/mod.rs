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

use forebay::Kind;
use forebay::hal::discover;
use forebay_rm::{Host, Rm as _};

/// The first CUDA device as the service names it, by the number of its `/dev/nvidiaN`: CUDA counts in an order of its own. 0
/// where nobody says.
pub fn number_of_gpu() -> u32 {
    let place = discover(&[Kind::Cuda]).0.first().and_then(|d| d.info().pci);
    let cards = place.and_then(|at| Some((at, Host.cards().ok()?)));
    let at_place = cards.and_then(|(at, cards)| cards.into_iter().find(|c| c.is_at(at.domain, at.bus, at.device)));
    at_place.map_or(0, |c| c.minor)
}

/// The value below which a part `q` of all is; 0 for none.
pub fn quantile(values: &[f64], q: f64) -> f64 {
    let mut v = values.to_vec();
    v.sort_by(f64::total_cmp);
    if v.is_empty() { 0.0 } else { v[((v.len() - 1) as f64 * q).round() as usize] }
}
