"""clang-tidy as a Bazel aspect: one action a file, run again only where that file or its headers change.

    bazel build --config=tidy //...
"""

def _flags(compilation):
    """What of a target's own compilation the parser needs to know."""
    flags = ["-std=c++20"]
    flags += ["-D" + define for define in compilation.defines.to_list() + compilation.local_defines.to_list()]
    for folder in compilation.quote_includes.to_list():
        flags += ["-iquote", folder]
    for folder in compilation.includes.to_list() + compilation.system_includes.to_list():
        flags += ["-isystem", folder]
    return flags

def _tidy_impl(target, ctx):
    if CcInfo not in target or target.label.workspace_name:
        return []
    compilation = target[CcInfo].compilation_context
    reports = []
    for source in [file for attr in getattr(ctx.rule.attr, "srcs", []) for file in attr.files.to_list()]:
        if source.extension != "cc" or source.path.startswith("third_party/"):
            continue
        report = ctx.actions.declare_file("%s.%s.tidy" % (source.basename, target.label.name))
        ctx.actions.run_shell(
            inputs = depset([source] + ctx.files._settings, transitive = [compilation.headers]),
            outputs = [report],
            arguments = [report.path, source.path, "--"] + _flags(compilation) + ctx.fragments.cpp.copts,
            # Its count of the warnings in other people's headers is of no interest.
            command = 'report=$1; shift; clang-tidy-14 --quiet "$@" >"$report" 2>/dev/null || { cat "$report" >&2; exit 1; }',
            mnemonic = "ClangTidy",
            progress_message = "Checking " + source.short_path,
        )
        reports.append(report)
    return [OutputGroupInfo(tidy = depset(reports))]

tidy = aspect(
    implementation = _tidy_impl,
    attrs = {"_settings": attr.label(default = "//:.clang-tidy", allow_single_file = True)},
    fragments = ["cpp"],
)
