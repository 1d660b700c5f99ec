//! `forebay demo`: programs that show what Forebay is for.

pub mod gesture;

/// A demonstration.
#[derive(clap::Subcommand)]
pub enum Demo {
    /// Two cameras → point cloud → noise filter → gestures (the application of the PTask paper)
    Gesture(gesture::Options),
}

/// Runs one.
pub fn run(demo: &Demo) -> Result<(), String> {
    match demo {
        Demo::Gesture(o) => gesture::run(o),
    }
}
