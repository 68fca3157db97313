// Runs the files on the command line, and those of folders, through a fuzz target, in builds
// without libFuzzer: what was once found stays tested.
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <span>
#include <string>

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);

namespace {

void run(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  const std::string input{std::istreambuf_iterator<char>(file), {}};
  // The last line names the input that ended the program, and has to be out by then.
  std::fprintf(stderr, "%s\n", path.c_str());
  LLVMFuzzerTestOneInput(reinterpret_cast<const std::uint8_t*>(input.data()), input.size());
}

}  // namespace

int main(int argc, char** argv) {
  int inputs = 0;
  for (const std::filesystem::path path : std::span(argv + 1, argv + argc)) {
    if (!std::filesystem::is_directory(path)) {
      run(path);
      ++inputs;
      continue;
    }
    for (const auto& entry : std::filesystem::directory_iterator(path)) {
      run(entry.path());
      ++inputs;
    }
  }
  return inputs > 0 ? 0 : 1;
}
