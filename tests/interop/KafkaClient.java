import java.time.Duration;
import java.util.ArrayList;
import java.util.HashSet;
import java.util.List;
import java.util.Map;
import java.util.Properties;
import java.util.Set;
import java.util.concurrent.Future;
import java.util.concurrent.TimeUnit;
import org.apache.kafka.clients.admin.Admin;
import org.apache.kafka.clients.admin.NewTopic;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.clients.producer.RecordMetadata;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.errors.TransactionalIdAuthorizationException;
import org.apache.kafka.common.serialization.StringDeserializer;
import org.apache.kafka.common.serialization.StringSerializer;

/** The Java client on a gateway: what each step found, one line each. Arguments: servers and a topic. */
public class KafkaClient {
    static final int EACH = 40;

    public static void main(String[] arguments) throws Exception {
        String servers = arguments[0];
        String topic = arguments[1];
        Properties settings = new Properties();
        settings.put("bootstrap.servers", servers);
        try (Admin admin = Admin.create(settings)) {
            admin.createTopics(List.of(new NewTopic(topic, 3, (short) 1))).all().get(30, TimeUnit.SECONDS);
            var described = admin.describeTopics(List.of(topic)).allTopicNames().get(30, TimeUnit.SECONDS);
            System.out.println("partitions " + described.get(topic).partitions().size());
        }
        settings.put("key.serializer", StringSerializer.class.getName());
        settings.put("value.serializer", StringSerializer.class.getName());
        for (String compression : List.of("none", "gzip", "snappy", "lz4", "zstd")) {
            settings.put("compression.type", compression);
            try (KafkaProducer<String, String> producer = new KafkaProducer<>(settings)) {
                List<Future<RecordMetadata>> sent = new ArrayList<>();
                for (int number = 0; number < EACH; number++) {
                    sent.add(producer.send(new ProducerRecord<>(topic, "k" + number, compression + number)));
                }
                for (Future<RecordMetadata> one : sent) {
                    one.get(30, TimeUnit.SECONDS);
                }
            }
        }
        read(servers, topic);
        settings.put("transactional.id", "t");
        try (KafkaProducer<String, String> producer = new KafkaProducer<>(settings)) {
            producer.initTransactions();
            System.out.println("transactions accepted");
        } catch (TransactionalIdAuthorizationException refused) {
            System.out.println("transactions refused");
        }
    }

    static void read(String servers, String topic) throws Exception {
        Properties settings = new Properties();
        settings.put("bootstrap.servers", servers);
        settings.put("group.id", "readers");
        settings.put("auto.offset.reset", "earliest");
        settings.put("key.deserializer", StringDeserializer.class.getName());
        settings.put("value.deserializer", StringDeserializer.class.getName());
        Set<String> values = new HashSet<>();
        long end = System.currentTimeMillis() + 60_000;
        try (KafkaConsumer<String, String> consumer = new KafkaConsumer<>(settings)) {
            consumer.subscribe(List.of(topic));
            while (values.size() < 5 * EACH && System.currentTimeMillis() < end) {
                consumer.poll(Duration.ofMillis(300)).forEach(record -> values.add(record.value()));
            }
            consumer.commitSync();
            TopicPartition first = new TopicPartition(topic, 0);
            long committed = consumer.committed(consumer.assignment()).values().stream().mapToLong(o -> o.offset()).sum();
            long early = consumer.offsetsForTimes(Map.of(first, 1L)).get(first).offset();
            System.out.println("read " + values.size() + " committed " + committed + " earliest " + early);
            System.out.println("commits when told");
            System.in.read();
            consumer.commitSync(Duration.ofSeconds(60));
            System.out.println("committed");
        }
    }
}
