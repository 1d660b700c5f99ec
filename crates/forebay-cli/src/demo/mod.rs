//! `forebay demo`: programs that show what Forebay is for.

pub mod gesture;
mod sharing;

/// A demonstration.
#[derive(clap::Subcommand)]
pub enum Demo {
    /// Two cameras → point cloud → noise filter → gestures (the application of the PTask paper)
    Gesture(gesture::Options),
    /// An interactive program beside one that takes everything: as the system shares, and steered
    Sharing(sharing::Options),
    /// One of the programs of `demo sharing` and `bench sharing`
    #[command(hide = true)]
    SharingProgram(crate::sharing::program::Options),
    /// Another one, which knows nothing of Forebay: it launches kernels of one length
    #[command(hide = true)]
    SharingPlain(crate::sharing::plain::Options),
}

/// Runs one.
pub fn run(demo: &Demo) -> Result<(), String> {
    match demo {
        Demo::Gesture(o) => gesture::run(o),
        Demo::Sharing(o) => sharing::run(o),
        Demo::SharingProgram(o) => crate::sharing::program::run(o),
        Demo::SharingPlain(o) => crate::sharing::plain::run(o),
    }
}
