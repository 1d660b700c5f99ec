//! `forebay bench report`: every committed result on one page.

use std::path::Path;

use super::schema::Report;

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
            page.push_str(&format!("\n![{0}]({name}/{0}.svg)\n\n", report.bench));
        }
    }
    page.push_str(&format!("\nTargets met: {met}; not met: {missed}.\n"));
    let to = dir.join("REPORT.md");
    std::fs::write(&to, page).map_err(|e| fail(&to, &e))?;
    crate::say(&format!("{}: {met} targets met, {missed} not", to.display()));
    Ok(())
}
