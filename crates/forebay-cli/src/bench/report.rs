//! `forebay bench report`: every committed result on one page.

use std::path::Path;

use super::schema::Report;
use super::transfer::pictures;

/// Writes `REPORT.md` into `dir` from all `*/*.json` beneath it.
pub fn render(dir: &Path) -> Result<(), String> {
    let fail = |p: &Path, e: &dyn std::fmt::Display| format!("{}: {e}", p.display());
    let list = |p: &Path| -> Result<Vec<std::path::PathBuf>, String> {
        let mut all: Vec<_> = std::fs::read_dir(p).map_err(|e| fail(p, &e))?.flatten().map(|e| e.path()).collect();
        all.sort();
        Ok(all)
    };
    let mut page =
        String::from("# Results\n\nMade by `forebay bench report` from the JSON files beside the pictures.\n");
    let (mut met, mut missed) = (0, 0);
    for machine in list(dir)?.into_iter().filter(|p| p.is_dir()) {
        let name = machine.file_name().unwrap_or_default().to_string_lossy().into_owned();
        page.push_str(&format!("\n# {name}\n\n"));
        for file in list(&machine)?.into_iter().filter(|p| p.extension().is_some_and(|e| e == "json")) {
            let text = std::fs::read_to_string(&file).map_err(|e| fail(&file, &e))?;
            let report: Report = serde_json::from_str(&text).map_err(|e| fail(&file, &e))?;
            met += report.rows.iter().filter(|r| r.met == Some(true)).count();
            missed += report.rows.iter().filter(|r| r.met == Some(false)).count();
            page.push_str(&report.markdown());
            // Drawn anew, by what this version draws of such figures.
            let bench = &report.bench;
            let bars = (bench.clone(), report.svg());
            let more = if bench == "transfer" { pictures::of(&report.rows) } else { Vec::new() };
            for (plot, svg) in std::iter::once(bars).chain(more) {
                let to = machine.join(format!("{plot}.svg"));
                std::fs::write(&to, svg).map_err(|e| fail(&to, &e))?;
            }
            for file in list(&machine)? {
                let plot = file.file_stem().unwrap_or_default().to_string_lossy().into_owned();
                let ours =
                    plot == *bench || plot.strip_prefix(bench.as_str()).is_some_and(|rest| rest.starts_with('-'));
                if ours && file.extension().is_some_and(|e| e == "svg") {
                    page.push_str(&format!("\n![{plot}]({name}/{plot}.svg)\n"));
                }
            }
            page.push('\n');
        }
    }
    page.push_str(&format!("\nTargets met: {met}; not met: {missed}.\n"));
    let to = dir.join("REPORT.md");
    std::fs::write(&to, page).map_err(|e| fail(&to, &e))?;
    crate::say(&format!("{}: {met} targets met, {missed} not", to.display()));
    Ok(())
}
