//! Real work with an implementation for each kind of device, checked against each other.

pub mod aes;
pub mod dxt;
pub mod grep;
pub mod histogram;
pub mod lbm;
pub mod mix;
pub mod particles;
