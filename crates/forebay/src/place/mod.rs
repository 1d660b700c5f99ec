//! Placement: each invocation on the device that will finish it first, under the load of this moment.
//!
//! A runtime in [`crate::Mode::Adaptive`] learns what each implementation of its tasks costs on each device (model.rs), reads
//! how much of every device is available now (load.rs; cores.rs: not all cores need be alike), keeps decisions stable (stability.rs), and has the ready queue start
//! what is predicted to end first (`forebay-policy`'s queue). Models stay on disk between runs (store.rs); adapt.rs brings it together for a task. `docs/placement.md`
//! explains all of it.

mod adapt;
mod circle;
mod cores;
mod energy;
mod fixed;
mod goal;
#[cfg(test)]
mod hostile;
mod lane;
mod load;
mod model;
mod stability;
mod store;
mod stub;

#[doc(hidden)]
pub use adapt::decision_cost;
pub(crate) use adapt::{Adapt, Situation};
pub use cores::{CoreClass, core_classes};
pub use energy::Energy;
pub use goal::{Action, Counter, Decision, Goal, Optimizer, PERIOD, Pursuit};
pub(crate) use load::Load;
pub use load::{Cpu, Working};
pub use model::{ENOUGH, Model, Prediction, Sample};
pub use stability::Stability;
pub use store::{Entry, Models};
pub use stub::{Accelerated, Difference, MAX_LANES, Pending};
