//! Real work with an implementation for each kind of device, checked against each other.

pub mod aes;
