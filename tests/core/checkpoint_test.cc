#include "core/checkpoint.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include "core/errors.h"
#include "tests/core/checkpoint_files.h"

namespace vlscope {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::string parse_error(const std::string& file) {
  return message_of<CheckpointError>([&] { parse_safetensors(file, "w.safetensors"); });
}

std::string open_error(const TempFolder& folder) {
  return message_of<CheckpointError>([&] { Checkpoint::open(folder.path()); });
}

std::vector<float> floats(const at::Tensor& tensor) {
  const auto* data = tensor.const_data_ptr<float>();
  return {data, data + tensor.numel()};
}

const FileTensor kA = f32("a", {2}, {1, 2});
const FileTensor kB = f32("b", {1, 3}, {3, 4, 5});
const std::string kIndexName = "model.safetensors.index.json";

/// Two shards and the index that names them.
void write_shards(const TempFolder& folder) {
  folder.write("one.safetensors", safetensors_file({kA}));
  folder.write("two.safetensors", safetensors_file({kB}));
  folder.write(kIndexName, R"({"weight_map":{"a":"one.safetensors","b":"two.safetensors"}})");
}

// ---- One file -----------------------------------------------------------------------------------

TEST(Safetensors, ListsTensorsInTheOrderOfTheirBytes) {
  const auto tensors = parse_safetensors(safetensors_file({kB, kA}), "w");
  ASSERT_EQ(tensors.size(), 2u);
  EXPECT_EQ(tensors[0].name, "b");
  EXPECT_EQ(tensors[0].dtype, "F32");
  EXPECT_EQ(tensors[0].scalar_type, at::kFloat);
  EXPECT_THAT(tensors[0].shape, ElementsAre(1, 3));
  EXPECT_EQ(tensors[0].end - tensors[0].begin, 12u);
  EXPECT_EQ(tensors[1].name, "a");
}

TEST(Safetensors, AcceptsMetadataScalarsAndEmptyTensors) {
  const std::string header =
      R"({"__metadata__":{"format":"pt"},"s":{"dtype":"I64","shape":[],"data_offsets":[0,8]},)"
      R"("e":{"dtype":"F16","shape":[3,0],"data_offsets":[0,0]}}   )";
  const auto tensors = parse_safetensors(safetensors_file(header, "12345678"), "w");
  ASSERT_EQ(tensors.size(), 2u);
  EXPECT_EQ(tensors[0].name, "e");
  EXPECT_TRUE(tensors[1].shape.empty());
}

TEST(Safetensors, KnowsTheNamesOfDtypesThatItCannotRead) {
  const std::string header = R"({"p":{"dtype":"F4","shape":[3,2],"data_offsets":[0,3]},)"
                             R"("q":{"dtype":"F8_E4M3","shape":[3],"data_offsets":[3,6]}})";
  const auto tensors = parse_safetensors(safetensors_file(header, "abcdef"), "w");
  EXPECT_EQ(tensors[0].dtype, "F4");
  EXPECT_FALSE(tensors[1].scalar_type.has_value());
}

struct Damage {
  std::string what;
  std::string file;
  std::string message;
};

void PrintTo(const Damage& damage, std::ostream* out) { *out << damage.what; }

class DamagedFile : public ::testing::TestWithParam<Damage> {};

TEST_P(DamagedFile, IsRefusedSayingWhere) {
  EXPECT_THAT(parse_error(GetParam().file),
              AllOf(HasSubstr("w.safetensors"), HasSubstr(GetParam().message)));
}

/// One tensor "t" of 4 data bytes whose entry is `fields`.
std::string with_entry(const std::string& fields) {
  return safetensors_file("{\"t\":{" + fields + "}}", "1234");
}

std::string with_shape(const std::string& shape) {
  return with_entry(R"("dtype":"F32","shape":)" + shape + R"(,"data_offsets":[0,4])");
}

std::string with_offsets(const std::string& offsets) {
  return with_entry(R"("dtype":"F32","shape":[1],"data_offsets":)" + offsets);
}

std::string with_two(const std::string& first, const std::string& second) {
  return safetensors_file(R"({"x":{"dtype":"U8","shape":[2],"data_offsets":)" + first +
                              R"(},"y":{"dtype":"U8","shape":[2],"data_offsets":)" + second + "}}",
                          "123456");
}

std::string nested(int depth) {
  return std::string("{\"t\":") + std::string(depth, '[') + std::string(depth, ']') + "}";
}

INSTANTIATE_TEST_SUITE_P(
    Length, DamagedFile,
    ::testing::Values(
        Damage{"empty", "", "0 bytes are too few"},
        Damage{"seven_bytes", "1234567", "7 bytes are too few"},
        Damage{"header_of_nothing", std::string(8, '\0'), "does not begin with {"},
        Damage{"header_past_the_end", safetensors_file("{}").substr(0, 9),
               "2 bytes is announced, but only 1 follow"},
        Damage{"header_over_the_cap", std::string(8, '\x01') + "{}", "at most 100000000"},
        Damage{"length_near_overflow", std::string(8, '\xff') + "{}", "18446744073709551615"}));

INSTANTIATE_TEST_SUITE_P(
    Json, DamagedFile,
    ::testing::Values(
        Damage{"not_json", safetensors_file("{\"a\":"), "not valid JSON"},
        Damage{"a_list", safetensors_file("[]"), "does not begin with {"},
        Damage{"leading_space", safetensors_file(" {}"), "does not begin with {"},
        Damage{"byte_order_mark", safetensors_file("\xef\xbb\xbf{}"), "does not begin with {"},
        Damage{"text_after_the_object", safetensors_file("{}x"), "not valid JSON"},
        Damage{"broken_utf8", safetensors_file("{\"\xff\":1}"), "not valid JSON"},
        Damage{"duplicate_tensor", safetensors_file(R"({"a":1,"a":2})"), "\"a\" appears twice"},
        Damage{"duplicate_field",
               with_entry(R"("dtype":"F32","dtype":"F32","shape":[1],"data_offsets":[0,4])"),
               "\"dtype\" appears twice"},
        Damage{"deep_nesting", safetensors_file(nested(100000)), "nested deeper than 64"},
        Damage{"number_past_double", safetensors_file("{\"a\":1e999}"), "not valid JSON"},
        Damage{"metadata_not_strings", safetensors_file(R"({"__metadata__":{"a":1}})"),
               "__metadata__"},
        Damage{"metadata_not_an_object", safetensors_file(R"({"__metadata__":"a"})"),
               "__metadata__"}));

INSTANTIATE_TEST_SUITE_P(
    Entry, DamagedFile,
    ::testing::Values(
        Damage{"not_an_object", safetensors_file(R"({"t":3})"), "\"t\": its header entry"},
        Damage{"no_dtype", with_entry(R"("shape":[1],"data_offsets":[0,4])"), "dtype is missing"},
        Damage{"no_shape", with_entry(R"("dtype":"F32","data_offsets":[0,4])"), "shape is missing"},
        Damage{"no_offsets", with_entry(R"("dtype":"F32","shape":[1])"), "data_offsets is missing"},
        Damage{"dtype_a_number", with_entry(R"("dtype":1,"shape":[1],"data_offsets":[0,4])"),
               "dtype is not a string"},
        Damage{"unknown_dtype", with_entry(R"("dtype":"F31","shape":[1],"data_offsets":[0,4])"),
               "unknown dtype \"F31\""},
        Damage{"shape_a_number", with_shape("1"), "shape is not a list"},
        Damage{"negative_size", with_shape("[-1]"), "shape holds something other"},
        Damage{"fractional_size", with_shape("[1.0]"), "shape holds something other"},
        Damage{"size_past_int64", with_shape("[9223372036854775808]"), "shape holds something"},
        Damage{"size_past_uint64", with_shape("[18446744073709551616]"), "shape holds something"},
        Damage{"product_overflows", with_shape("[4294967296,4294967296,4294967297]"),
               "too large to count"},
        Damage{"strides_overflow",
               safetensors_file(R"({"t":{"dtype":"F32","data_offsets":[0,0],)"
                                R"("shape":[0,4294967296,4294967296]}})"),
               "too large to count"},
        Damage{"half_a_byte", with_entry(R"("dtype":"F4","shape":[1],"data_offsets":[0,4])"),
               "does not fill whole bytes"},
        Damage{"shape_disagrees", with_shape("[2]"), "takes 8 bytes, but data_offsets [0, 4]"}));

INSTANTIATE_TEST_SUITE_P(
    Span, DamagedFile,
    ::testing::Values(Damage{"one_offset", with_offsets("[0]"), "not a list of two numbers"},
                      Damage{"offsets_backwards", with_offsets("[4,0]"), "[4, 0] do not lie"},
                      Damage{"offset_negative", with_offsets("[-4,0]"), "something other than"},
                      Damage{"past_the_end", with_offsets("[4,8]"), "within the 4 bytes"},
                      Damage{"past_int64", with_offsets("[0,18446744073709551615]"),
                             "something other than"},
                      Damage{"hole_at_the_start", with_two("[2,4]", "[4,6]"), "begins at byte 2"},
                      Damage{"hole_between", with_two("[0,2]", "[4,6]"), "begins at byte 4"},
                      Damage{"overlap", with_two("[0,2]", "[1,3]"), "begins at byte 1"},
                      Damage{"trailing_bytes", with_two("[0,2]", "[2,4]"), "but the file has"}));

TEST(Safetensors, RefusesMoreDimensionsThanATensorCanHave) {
  std::string shape = "[1";
  for (int i = 0; i < 64; ++i) shape += ",1";
  EXPECT_THAT(parse_error(with_shape(shape + "]")), HasSubstr("65 dimensions"));
}

TEST(Safetensors, RefusesMoreValuesThanAHeaderMayHold) {
  std::string header = R"({"t":[0)";
  for (int i = 0; i < 4'000'000; ++i) header += ",0";
  EXPECT_THAT(parse_error(safetensors_file(header + "]}")), HasSubstr("more than 4000000 values"));
}

TEST(Safetensors, RefusesEveryFileWithOneByteMoreOrOneBitOfItsLengthTurned) {
  const std::string file = safetensors_file({kA, kB});
  EXPECT_THROW(parse_safetensors(file + '\0', "w"), CheckpointError);
  for (std::size_t bit = 0; bit < 64; ++bit) {
    std::string turned = file;
    turned[bit / 8] = static_cast<char>(turned[bit / 8] ^ (1 << bit % 8));
    EXPECT_THROW(parse_safetensors(turned, "w"), CheckpointError) << bit;
  }
}

TEST(Safetensors, RefusesEveryCutOfAGoodFile) {
  const std::string file = safetensors_file({kA, kB});
  for (std::size_t size = 0; size < file.size(); ++size) {
    EXPECT_THROW(parse_safetensors(file.substr(0, size), "w"), CheckpointError) << size;
  }
}

// ---- A folder -----------------------------------------------------------------------------------

TEST(Checkpoint, ReadsASingleFile) {
  const TempFolder folder;
  folder.write("model.safetensors", safetensors_file({kA, kB}));
  const Checkpoint checkpoint = Checkpoint::open(folder.path());
  EXPECT_THAT(checkpoint.names(), ElementsAre("a", "b"));
  EXPECT_TRUE(checkpoint.contains("a"));
  EXPECT_FALSE(checkpoint.contains("c"));
  EXPECT_THAT(checkpoint.tensor("b").sizes().vec(), ElementsAre(1, 3));
  EXPECT_THAT(floats(checkpoint.tensor("b")), ElementsAre(3, 4, 5));
  EXPECT_FALSE(checkpoint.tensor("b").requires_grad());
  EXPECT_THAT(message_of<CheckpointError>([&] { checkpoint.tensor("c"); }), HasSubstr("\"c\""));
}

TEST(Checkpoint, SharesOneMemoryBetweenTensorsOfOneName) {
  const TempFolder folder;
  folder.write("model.safetensors", safetensors_file({kA}));
  const Checkpoint checkpoint = Checkpoint::open(folder.path());
  EXPECT_EQ(checkpoint.tensor("a").data_ptr(), checkpoint.tensor("a").data_ptr());
}

TEST(Checkpoint, KeepsWritesOutOfTheFile) {
  const TempFolder folder;
  folder.write("model.safetensors", safetensors_file({kA}));
  const std::string before = folder.read("model.safetensors");
  const Checkpoint checkpoint = Checkpoint::open(folder.path());
  checkpoint.tensor("a").fill_(7);
  EXPECT_THAT(floats(checkpoint.tensor("a")), ElementsAre(7, 7));
  EXPECT_EQ(folder.read("model.safetensors"), before);
  EXPECT_THAT(floats(Checkpoint::open(folder.path()).tensor("a")), ElementsAre(1, 2));
}

TEST(Checkpoint, OutlivesItselfTheDeletionAndTheReplacementOfItsFile) {
  const TempFolder folder;
  folder.write("model.safetensors", safetensors_file({kA}));
  at::Tensor deleted;
  at::Tensor replaced;
  {
    const Checkpoint checkpoint = Checkpoint::open(folder.path());
    replaced = checkpoint.tensor("a");
    folder.write("other", safetensors_file({f32("a", {2}, {8, 9})}));
    std::filesystem::rename(folder.path() / "other", folder.path() / "model.safetensors");
    deleted = Checkpoint::open(folder.path()).tensor("a");
    std::filesystem::remove(folder.path() / "model.safetensors");
  }
  EXPECT_THAT(floats(replaced), ElementsAre(1, 2));
  EXPECT_THAT(floats(deleted), ElementsAre(8, 9));
}

/// What a mapped file says of itself after `change`, to which its path is passed; "" if nothing.
template <class Change>
std::string said_after(Change change) {
  const TempFolder folder;
  const std::filesystem::path path = folder.path() / "w";
  folder.write("w", "before");
  set_age(path, std::chrono::hours(1));  // The clock of files may stand still over a whole test.
  const auto file = MappedFile::open(path);
  file->require_unchanged();
  change(path);
  try {
    file->require_unchanged();
  } catch (const CheckpointError& error) {
    return error.what();
  }
  return "";
}

TEST(MappedFile, TellsThatItsFileWasWrittenTo) {
  const auto write = [](const char* text, std::ios::openmode mode) {
    return said_after([=](const auto& path) { std::ofstream(path, mode) << text; });
  };
  const auto again = std::ios::binary | std::ios::in;  // Without truncation.
  EXPECT_THAT(write("after!", again), AllOf(HasSubstr("/w: "), HasSubstr("6 bytes, of"),
                                            HasSubstr("6 bytes, of "), HasSubstr("copy=True")));
  EXPECT_THAT(write("b", std::ios::binary | std::ios::trunc), HasSubstr("1 bytes, of"));
  EXPECT_THAT(write("s", std::ios::binary | std::ios::app), HasSubstr("7 bytes, of"));
  EXPECT_THAT(said_after([](const auto& path) { std::filesystem::resize_file(path, 0); }),
              HasSubstr("0 bytes, of"));
  EXPECT_THAT(said_after([](const auto& path) { set_age(path, std::chrono::hours(0)); }),
              HasSubstr("6 bytes, of"));
}

TEST(MappedFile, IsTheFileThatWasOpenedWhateverHasItsNameNow) {
  namespace fs = std::filesystem;
  EXPECT_EQ(said_after([](const auto& path) { fs::remove(path); }), "");
  EXPECT_EQ(said_after([](const auto& path) { fs::rename(path, path.parent_path() / "away"); }),
            "");
  EXPECT_EQ(said_after([](const auto& path) {
              fs::remove(path);
              std::ofstream(path) << "another file";
            }),
            "");
  EXPECT_EQ(said_after([](const auto& path) {
              fs::create_hard_link(path, path.parent_path() / "link");
              fs::permissions(path, fs::perms::owner_read);
            }),
            "");
}

TEST(MappedFile, HoldsWhatLiesInIt) {
  const TempFolder folder;
  folder.write("w", "bytes");
  folder.write("empty", "");
  const auto file = MappedFile::open(folder.path() / "w");
  EXPECT_TRUE(file->holds(file->data()));
  EXPECT_TRUE(file->holds(file->data() + 4));
  EXPECT_FALSE(file->holds(file->data() + 5));
  EXPECT_FALSE(file->holds(nullptr));
  EXPECT_FALSE(MappedFile::open(folder.path() / "empty")->holds(nullptr));
}

TEST(Checkpoint, CopiesUnalignedTensors) {
  const TempFolder folder;
  folder.write("model.safetensors", safetensors_file({kA, kB}, /*shift=*/3));
  const Checkpoint checkpoint = Checkpoint::open(folder.path());
  EXPECT_THAT(floats(checkpoint.tensor("b")), ElementsAre(3, 4, 5));
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(checkpoint.tensor("b").data_ptr()) % 4, 0u);
}

TEST(Checkpoint, RefusesToMakeATensorOfADtypeKnownByNameOnly) {
  const TempFolder folder;
  folder.write("model.safetensors", safetensors_file({{"q", "F8_E4M3", {2}, "ab"}}));
  const Checkpoint checkpoint = Checkpoint::open(folder.path());
  EXPECT_EQ(checkpoint.info("q").dtype, "F8_E4M3");
  EXPECT_THAT(message_of<CheckpointError>([&] { checkpoint.tensor("q"); }), HasSubstr("F8_E4M3"));
}

TEST(Checkpoint, FollowsTheIndexToItsShards) {
  const TempFolder folder;
  write_shards(folder);
  folder.write("unrelated.safetensors", "rubbish");
  const Checkpoint checkpoint = Checkpoint::open(folder.path());
  EXPECT_THAT(checkpoint.names(), ElementsAre("a", "b"));
  EXPECT_EQ(checkpoint.file("b").filename(), "two.safetensors");
  EXPECT_THAT(floats(checkpoint.tensor("b")), ElementsAre(3, 4, 5));
}

TEST(Checkpoint, FollowsLinksOutOfTheFolderAsTheHubCacheHasThem) {
  const TempFolder folder;
  const TempFolder blobs;
  blobs.write("4f1c", safetensors_file({kA}));
  std::filesystem::create_symlink(blobs.path() / "4f1c", folder.path() / "model.safetensors");
  EXPECT_THAT(floats(Checkpoint::open(folder.path()).tensor("a")), ElementsAre(1, 2));
}

TEST(Checkpoint, NamesTheMissingShardAndHowManyTensorsItHeld) {
  const TempFolder folder;
  write_shards(folder);
  std::filesystem::remove(folder.path() / "two.safetensors");
  EXPECT_THAT(message_of<CheckpointNotFound>([&] { Checkpoint::open(folder.path()); }),
              AllOf(HasSubstr("two.safetensors (1 tensors)"), HasSubstr("1 of the 2 files")));
}

TEST(Checkpoint, RefusesAnIndexThatListsATensorItsShardLacks) {
  const TempFolder folder;
  write_shards(folder);
  folder.write("two.safetensors", safetensors_file({f32("c", {1}, {1})}));
  EXPECT_THAT(open_error(folder), AllOf(HasSubstr("two.safetensors"), HasSubstr("\"b\""),
                                        HasSubstr("listed"), HasSubstr("not stored")));
}

TEST(Checkpoint, RefusesAShardThatHoldsATensorTheIndexDoesNotList) {
  const TempFolder folder;
  write_shards(folder);
  folder.write("two.safetensors", safetensors_file({kB, f32("c", {1}, {1})}));
  EXPECT_THAT(open_error(folder), AllOf(HasSubstr("\"c\" is stored and not listed"),
                                        HasSubstr("lists 1 tensors"), HasSubstr("holds 2")));
}

TEST(Checkpoint, RefusesAnIndexThatLeavesTheFolder) {
  for (const std::string file : {"../w.safetensors", "/tmp/w.safetensors", "a/../../w", ""}) {
    const TempFolder folder;
    folder.write(kIndexName, fmt::format(R"({{"weight_map":{{"a":"{}"}}}})", file));
    EXPECT_THAT(open_error(folder), HasSubstr("inside the folder")) << file;
  }
}

TEST(Checkpoint, RefusesADamagedIndex) {
  for (const std::string text :
       {"", "[]", "{}", R"({"weight_map":[]})", R"({"weight_map":{}})", R"({"weight_map":{"a":1}})",
        R"({"weight_map":{"a":"x","a":"y"}})"}) {
    const TempFolder folder;
    folder.write(kIndexName, text);
    EXPECT_THAT(open_error(folder), HasSubstr(kIndexName)) << text;
  }
}

TEST(Checkpoint, RefusesAnIndexThatNamesAShardForTheTensorOfAnother) {
  const TempFolder folder;
  write_shards(folder);
  folder.write(kIndexName, R"({"weight_map":{"a":"two.safetensors","b":"one.safetensors"}})");
  EXPECT_THAT(open_error(folder), AllOf(HasSubstr("one.safetensors"), HasSubstr("\"a\""),
                                        HasSubstr("stored and not listed")));
}

TEST(Checkpoint, RefusesTheSameShardUnderTwoNames) {
  const TempFolder folder;
  write_shards(folder);
  folder.write(kIndexName, R"({"weight_map":{"a":"one.safetensors","b":"./one.safetensors"}})");
  EXPECT_THAT(open_error(folder), HasSubstr("one.safetensors"));
}

TEST(Checkpoint, RefusesAnIndexLongerThanAnyIsUnread) {
  const TempFolder folder;
  folder.write(kIndexName, "{");
  std::filesystem::resize_file(folder.path() / kIndexName, uintmax_t{1} << 32);
  EXPECT_THAT(open_error(folder), HasSubstr("4294967296 bytes, at most 100000000 are read"));
}

TEST(Checkpoint, HoldsTensorsWithoutElementsAndThoseAfterThem) {
  const TempFolder folder;
  folder.write("model.safetensors", safetensors_file({{"e", "F32", {3, 0}, ""}, kA}));
  const Checkpoint checkpoint = Checkpoint::open(folder.path());
  EXPECT_THAT(checkpoint.tensor("e").sizes().vec(), ElementsAre(3, 0));
  EXPECT_THAT(floats(checkpoint.tensor("a")), ElementsAre(1, 2));
}

TEST(Checkpoint, ReadsShardsWithoutAnIndex) {
  const TempFolder folder;
  write_shards(folder);
  std::filesystem::remove(folder.path() / kIndexName);
  EXPECT_THAT(Checkpoint::open(folder.path()).names(), ElementsAre("a", "b"));
}

TEST(Checkpoint, RefusesATensorStoredInTwoShards) {
  const TempFolder folder;
  folder.write("one.safetensors", safetensors_file({kA}));
  folder.write("two.safetensors", safetensors_file({kA}));
  EXPECT_THAT(open_error(folder), AllOf(HasSubstr("two.safetensors"), HasSubstr("\"a\""),
                                        HasSubstr("one.safetensors")));
}

TEST(Checkpoint, SaysWhatIsNotThere) {
  const TempFolder folder;
  EXPECT_THAT(message_of<CheckpointNotFound>([&] { Checkpoint::open(folder.path()); }),
              HasSubstr("no weights"));
  EXPECT_THAT(message_of<CheckpointNotFound>([&] { Checkpoint::open(folder.path() / "no"); }),
              HasSubstr("no such folder"));
  folder.write("file", "x");
  EXPECT_THAT(message_of<CheckpointError>([&] { Checkpoint::open(folder.path() / "file"); }),
              HasSubstr("not a folder"));
}

TEST(Checkpoint, RefusesEmptyFilesFoldersAndPipesInPlaceOfWeights) {
  const TempFolder empty;
  empty.write("model.safetensors", "");
  EXPECT_THAT(open_error(empty), HasSubstr("0 bytes"));
  const TempFolder directory;
  std::filesystem::create_directory(directory.path() / "model.safetensors");
  EXPECT_THAT(open_error(directory), HasSubstr("not a regular file"));
  const TempFolder pipe;
  ASSERT_EQ(::mkfifo((pipe.path() / "model.safetensors").c_str(), 0600), 0);
  EXPECT_THAT(open_error(pipe), HasSubstr("not a regular file"));
}

TEST(Checkpoint, OpensAFolderWithSpacesAndOtherLetters) {
  const TempFolder folder;
  const auto path = folder.path() / "mein Modell \xC3\xA4\xE6\xA8\xA1";
  std::filesystem::create_directory(path);
  folder.write(path.filename() / "model.safetensors", safetensors_file({kA}));
  EXPECT_THAT(floats(Checkpoint::open(path).tensor("a")), ElementsAre(1, 2));
}

}  // namespace
}  // namespace vlscope
